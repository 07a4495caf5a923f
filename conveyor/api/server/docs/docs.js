// Adds a form to each operation that is opened. The form sends the request and shows the response.
// The values come from /openapi.json, so this file knows no operation.
"use strict";

// A longer text would make the page slow.
const SHOWN_CHARS_MAX = 100000;
let loaded = null;

function load() {
  if (!loaded) loaded = fetch("/openapi.json").then((response) => response.json());
  return loaded;
}

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function field(form, id, text, value, name = "input") {
  const input = element(name, { id, spellcheck: "false", autocomplete: "off" });
  input.value = value === undefined || value === null ? "" : value;
  form.append(element("label", { for: id }, text), input);
  return input;
}

function addForm(details, operation) {
  const id = details.id;
  const form = element("form", {}, element("h3", {}, "Send a request"));
  const inputs = (operation.parameters || []).map((parameter) => {
    const text = `${parameter.name} (${parameter.in}${parameter.required ? ", required" : ""})`;
    // Ids in paths are examples of another server: an empty field makes the reader fill in their own.
    const value = parameter.in === "query" ? parameter.example : "";
    return [parameter, field(form, `${id}-${parameter.in}-${parameter.name}`, text, value)];
  });
  let body = null;
  let kind = null;
  if (operation.requestBody) {
    const [[type, media]] = Object.entries(operation.requestBody.content);
    kind = type === "*/*" ? "text/plain" : type;
    const example = media.example;
    const text = typeof example === "string" ? example : JSON.stringify(example, null, 2);
    body = field(form, `${id}-body`, "Body", text, "textarea");
  }
  const shown = element("div", { role: "status" });
  form.append(element("button", { type: "submit" }, "Send"), shown);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(details, inputs, body && body.value, kind, shown);
  });
  details.append(form);
}

async function send(details, inputs, body, kind, shown) {
  const query = new URLSearchParams();
  const headers = {};
  let path = details.dataset.path;
  for (const [parameter, input] of inputs) {
    const value = input.value.trim();
    if (parameter.in === "path") path = path.replace(`{${parameter.name}}`, encodeURIComponent(value));
    else if (value && parameter.in === "query") query.set(parameter.name, value);
    else if (value) headers[parameter.name] = value;
  }
  const key = document.getElementById("api-key").value.trim();
  if (key) headers["X-API-Key"] = key;
  if (body !== null) headers["Content-Type"] = kind;
  const target = query.size ? `${path}?${query}` : path;
  shown.replaceChildren("Sending\u2026");
  try {
    const options = { method: details.dataset.method, headers, credentials: "omit" };
    if (body !== null) options.body = body;
    const began = performance.now();
    const response = await fetch(target, options);
    const text = await response.text();
    const elapsed = Math.round(performance.now() - began);
    show(shown, response, text, elapsed);
  } catch (error) {
    shown.replaceChildren(`The request failed: ${error.message}`);
  }
}

function show(shown, response, text, elapsed) {
  const type = response.headers.get("Content-Type") || "";
  let pretty = text;
  if (type.includes("json")) {
    try {
      pretty = JSON.stringify(JSON.parse(text), null, 2);
    } catch {
      // The text is shown as it came.
    }
  }
  const head = [...response.headers].map(([name, value]) => `${name}: ${value}`).join("\n");
  shown.replaceChildren(
    element("p", {}, element("b", {}, `${response.status} ${response.statusText}`), ` in ${elapsed} ms`),
    element("pre", { tabindex: "0" }, `${head}\n\n${pretty.slice(0, SHOWN_CHARS_MAX)}`),
  );
}

async function opened(details) {
  if (!details.open || details.dataset.ready) return;
  details.dataset.ready = "true";
  const spec = await load();
  addForm(details, spec.paths[details.dataset.path][details.dataset.method.toLowerCase()]);
}

function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.matches("details.operation")) target.open = true;
}

const credentials = document.getElementById("credentials");
credentials.hidden = false;
credentials.addEventListener("submit", (event) => event.preventDefault());
for (const details of document.querySelectorAll("details.operation")) {
  details.addEventListener("toggle", () => opened(details));
}
window.addEventListener("hashchange", openTarget);
openTarget();
