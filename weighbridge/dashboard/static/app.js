// Keeps the page current and adds shortcuts. Everything here is a comfort: without it each page still works.
"use strict";
const one = (selector, from = document) => from.querySelector(selector);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const root = document.documentElement;
let stream = null, paused = false, heard = 0, held = {}, failures = 0;

// Make `old` equal to `fresh`, touching only what differs, so that focus, selection and scroll position stay.
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) { old.replaceWith(fresh); return; }
  if (old.nodeType !== Node.ELEMENT_NODE) { if (old.data !== fresh.data) old.data = fresh.data; return; }
  for (const a of fresh.attributes) if (old.getAttribute(a.name) !== a.value) old.setAttribute(a.name, a.value);
  for (const a of [...old.attributes]) if (!fresh.hasAttribute(a.name) && !a.name.startsWith("data-js")) old.removeAttribute(a.name);
  const keyed = new Map([...old.children].filter((c) => c.id).map((c) => [c.id, c]));
  let at = old.firstChild;
  for (const want of [...fresh.childNodes]) {
    const have = want.id ? keyed.get(want.id) : at && !at.id ? at : null;
    if (!have) { old.insertBefore(want, at); continue; }
    if (have !== at) old.insertBefore(have, at); else at = at.nextSibling;
    morph(have, want);
  }
  while (at) { const next = at.nextSibling; at.remove(); at = next; }
}

function parse(markup) {
  const holder = document.createElement("template");
  holder.innerHTML = markup;
  return holder.content;
}

function show(changes) {
  for (const [id, markup] of Object.entries(changes)) {
    if (id === "main") { const fresh = one("#main").cloneNode(false); fresh.append(parse(markup)); morph(one("#main"), fresh); continue; }
    const old = document.getElementById(id);
    if (old && !(old.contains(document.activeElement) && document.activeElement.matches("select,input,textarea"))) morph(old, parse(markup).firstElementChild);
  }
  decorate();
}

function listen() {
  stream?.close();
  stream = null;
  const url = document.body.dataset.live;
  if (!url || document.hidden) return;
  stream = new EventSource(url);
  stream.onmessage = (event) => {
    heard = Date.now();
    failures = 0;
    const changes = JSON.parse(event.data);
    if (changes.main) held = {};
    if (paused) Object.assign(held, changes); else show(changes);
  };
  stream.onerror = () => { if (stream.readyState === EventSource.CLOSED && failures++ < 20) setTimeout(listen, 2000 + 1000 * failures); };
}

// The age counts on this browser's clock: a page that stands still must not look alive.
setInterval(() => {
  const status = one("#conn");
  if (!document.body.dataset.live) return;
  const age = (Date.now() - heard) / 1000;
  const [text, kind] = paused ? ["paused", "warn"] : !heard ? ["connecting", ""] : age < 3.5 ? ["live", "ok"] : [`no data for ${age.toFixed(0)} s`, "bad"];
  if (status.textContent !== text) { status.textContent = text; status.className = `conn ${kind}`; }
}, 500);

function pause(on) {
  paused = on;
  const button = one("#pause");
  if (!button) return;
  button.setAttribute("aria-pressed", String(on));
  button.textContent = on ? "Resume" : "Pause";
  if (!on) { show(held); held = {}; }
}

function theme() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
}

async function visit(url, push) {
  const answer = await fetch(url, { headers: { accept: "text/html" } });
  if (!answer.ok || answer.redirected) { location.href = url; return; }
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  document.title = page.title;
  if (push) history.pushState(null, "", url);
  if (page.body.dataset.live) document.body.dataset.live = page.body.dataset.live; else delete document.body.dataset.live;
  morph(one("#main"), one("#main", page));
  held = {};
  decorate();
  listen();
}

function decorate() {
  for (const button of all("button.copy[hidden]")) button.hidden = false;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (button?.id === "pause") return pause(!paused);
  if (button?.id === "theme") return theme();
  if (button?.matches(".copy")) {
    const text = button.dataset.copy ?? await (await fetch(button.dataset.fetch)).text();
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = button.dataset.copy ? "Copy" : "Copy as JSON"; }, 1500);
    return;
  }
  if (button || event.target.closest("input,select,textarea,label")) return;
  const link = event.target.closest("a") ?? one("th a", event.target.closest("tr[id]:not(.pool)") ?? document.createElement("i"));
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey || link.origin !== location.origin || link.pathname !== location.pathname || link.hash) return;
  event.preventDefault();
  visit(link.href, true);
});
addEventListener("popstate", () => visit(location.href, false));
document.addEventListener("change", (event) => { if (event.target.matches("select")) event.target.closest("form[data-auto]")?.requestSubmit(); });

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input,select,textarea")) return;
  if (event.key === "p") pause(!paused);
  if (event.key !== "j" && event.key !== "k") return;
  const rows = all("tr[id]:not(.pool)"), to = rows[rows.findIndex((r) => r.classList.contains("sel")) + (event.key === "j" ? 1 : -1)];
  const link = to && one("th a", to);
  if (link) visit(link.href, true).then(() => document.getElementById(to.id)?.scrollIntoView({ block: "nearest" }));
});

document.addEventListener("visibilitychange", () => { if (!document.hidden) listen(); else { stream?.close(); stream = null; } });

const tip = Object.assign(document.createElement("div"), { id: "tip", hidden: true });
document.body.append(tip);
document.addEventListener("pointermove", (event) => {
  const chart = event.target.closest?.("svg.chart"), lines = chart ? all("path[data-points]", chart).filter((p) => p.dataset.points) : [];
  for (const cross of all(".cross.on")) if (!chart?.contains(cross)) cross.classList.remove("on");
  tip.hidden = !lines.length;
  if (!lines.length) return;
  const box = chart.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
  const near = lines.map((line) => [line.dataset.name, ...line.dataset.points.split(";").map((p) => p.split(",").map(Number)).reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)]);
  const cross = one(".cross", chart);
  cross.setAttribute("x1", near[0][1]); cross.setAttribute("x2", near[0][1]); cross.classList.add("on");
  tip.textContent = `${near[0][2]} ${chart.dataset.xunit}\n` + near.map(([name, , , y]) => `${name} ${y} ${chart.dataset.unit}`).join("\n");
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 14}px`;
});

const saved = localStorage.getItem("theme");
if (saved === "light" || saved === "dark") root.dataset.theme = saved;
for (const button of all("#pause,#theme")) button.hidden = false;
decorate();
listen();
