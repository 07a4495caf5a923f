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
    const text = size < 60 ? `${Math.round(size)} s` : size < 3600 ? `${Math.round(size / 60)} min` : hours(size);
    return s >= 0 ? `${text} ago` : `in ${text}`;
  };
  const show = (text, kind) => { if (state) { state.hidden = false; state.textContent = text; state.className = kind; } };
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
      for (const [id, html] of Object.entries(JSON.parse(event.data))) {
        const place = document.getElementById(id);
        // A visitor who is using a control keeps it until the next change.
        if (!place || place.innerHTML === html || place.contains(document.activeElement)) continue;
        place.innerHTML = html;
        times(place);
      }
    });
  };
  const close = () => { if (stream) { stream.close(); stream = null; } };
  document.addEventListener("visibilitychange", () => { if (document.hidden) { close(); show("paused", "off"); } else open(); });
  addEventListener("pagehide", close);
  times(document);
  setInterval(() => times(document), 10000);
  open();
})();
