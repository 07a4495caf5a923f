// Live updates and local times. Every page works without this script.
(() => {
  "use strict";
  const state = document.getElementById("connection");
  const times = (root) => {
    for (const each of root.querySelectorAll("time")) {
      const at = new Date(each.dateTime);
      if (isNaN(at)) continue;
      const away = (Date.now() - at) / 1000;
      each.title = at.toLocaleString();
      each.textContent = words(away) || at.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    }
  };
  const hours = (s) => {
    const minutes = Math.round(s / 60);
    return `${Math.floor(minutes / 60)} h` + (minutes % 60 ? ` ${minutes % 60} min` : "");
  };
  // Recent and near instants as distances; others as dates.
  const words = (s) => {
    const size = Math.abs(s);
    if (size > 86400) return "";
    if (size < 1) return "now";
    const text = size < 60 ? `${Math.round(size)} s` : size < 3600 ? `${Math.round(size / 60)} min` : hours(size);
    return s >= 0 ? `${text} ago` : `in ${text}`;
  };
  const show = (text, kind) => { if (state) { state.hidden = false; state.textContent = text; state.className = kind; } };
  // Blocks whose update waits until the visitor has left the control that they hold.
  const waiting = new Map();
  const update = (id, html) => {
    waiting.delete(id);
    const place = document.getElementById(id);
    if (!place || place.innerHTML === html) return;
    if (place.contains(document.activeElement)) { waiting.set(id, html); return; }
    const choices = choicesIn(place);
    place.innerHTML = html;
    for (const control of controls(place)) {
      if (choices.has(keyOf(control))) control.value = choices.get(keyOf(control));
    }
    times(place);
  };
  // What a visitor has chosen or typed, so that an update does not take it back.
  const controls = (place) => place.querySelectorAll("select, input:not([type=hidden], [type=checkbox]), textarea");
  const keyOf = (control) => {
    const fixed = control.form ? control.form.querySelectorAll("[type=hidden]:not([name=token], [name=once])") : [];
    return [control.form && control.form.action, control.name, ...[...fixed].map((each) => each.value)].join(" ");
  };
  const isChanged = (control) => control.options
    ? control.value !== [...control.options].reduce((first, option) => option.defaultSelected ? option : first).value
    : control.value !== control.defaultValue;
  const choicesIn = (place) =>
    new Map([...controls(place)].filter(isChanged).map((control) => [keyOf(control), control.value]));
  // A little later, because a press of the mouse moves the focus before it counts as a click.
  document.addEventListener("focusout", () => setTimeout(() => {
    for (const [id, html] of [...waiting]) update(id, html);
  }, 500));
  let stream = null;
  const open = () => {
    const page = document.body.dataset.live;
    if (!page || stream || document.hidden) return;
    stream = new EventSource("/ui/live?page=" + encodeURIComponent(page));
    stream.addEventListener("open", () => show("live", "on"));
    stream.addEventListener("error", () => {
      show("reconnecting", "off");
      // A refusal closes the stream for good: try again later, as after a lost connection.
      if (stream && stream.readyState === EventSource.CLOSED) { close(); setTimeout(open, 5000); }
    });
    stream.addEventListener("blocks", (event) => {
      for (const [id, html] of Object.entries(JSON.parse(event.data))) update(id, html);
    });
  };
  const close = () => { if (stream) { stream.close(); stream = null; } };
  document.addEventListener("visibilitychange", () => { if (document.hidden) { close(); show("paused", "off"); } else open(); });
  addEventListener("pagehide", close);
  times(document);
  setInterval(() => times(document), 10000);
  open();
})();
