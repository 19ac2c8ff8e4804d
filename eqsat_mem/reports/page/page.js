"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const detail = document.getElementById("detail");
const title = document.getElementById("detail-title");
const slider = document.getElementById("point");
const order = data.panels.flatMap((panel) => data.points[panel.which].map((_, at) => ({ panel, at })));

// Text goes in as text, never as markup.
function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function bytes(size) {
  let unit = 0;
  while (unit < 5 && size >= 1024 ** (unit + 1)) unit += 1;
  return +(size / 1024 ** unit).toFixed(2) + " " + ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit];
}

function show(heading, hash, ...children) {
  title.textContent = heading;
  detail.replaceChildren(...children);
  detail.parentElement.open = true;
  detail.closest("aside").scrollTop = 0;
  if (hash) history.replaceState(null, "", "#" + hash);
}

// --- points of timelines

function tensor(number) {
  const [what, place, role, color, home] = data.tensors[number];
  return { what, place, role, color, home };
}

function heldRow(color, size, ...text) {
  return element("div", "held", element("i", "chip " + color), element("b", "", bytes(size)), element("span", "", ...text));
}

// Colours in the order of the legend, so that the pieces of a role are side by side.
const roles = [...document.querySelectorAll(".legend .chip")].map((chip) => chip.classList[1]);

function composition(point) {
  const bar = element("div", "composition");
  const rank = ([number]) => roles.indexOf(tensor(number).color);
  for (const [number, size] of [...point.held].sort((a, b) => rank(a) - rank(b))) {
    const { what, color } = tensor(number);
    const piece = element("i", color);
    piece.style.width = (100 * size) / Math.max(point.nbytes, 1) + "%";
    piece.title = bytes(size) + "  " + what;
    bar.append(piece);
  }
  if (point.more) bar.append(element("i", "rest"));
  return bar;
}

// So many rows of arguments are listed, and the others together.
const GIVEN = 3;

// Tensors alike in size, description and line are one row.
function alike(held) {
  const groups = new Map();
  for (const [number, size] of held) {
    const { what, place, color } = tensor(number);
    const key = [what, place, color, size].join("|");
    groups.set(key, [...(groups.get(key) ?? []), [number, size]]);
  }
  return [...groups.values()].sort((a, b) => b.length * b[0][1] - a.length * a[0][1]);
}

function mark(panel, at) {
  for (const plot of document.querySelectorAll(".plot")) {
    const cursor = plot.querySelector(".cursor");
    cursor.hidden = plot.dataset.panel !== panel.which;
    cursor.style.left = (100 * at) / data.points[panel.which].length + "%";
  }
}

function showPoint(place, keepHash) {
  const { panel, at } = order[place];
  const point = data.points[panel.which][at];
  mark(panel, at);
  slider.value = place;
  const step = `${panel.title}, step ${at + 1} of ${data.points[panel.which].length}`;
  slider.setAttribute("aria-valuetext", `${step}: ${bytes(point.nbytes)}, ${point.what}`);
  const groups = alike(point.held);
  const rest = groups.filter((group) => tensor(group[0][0]).color === "arguments").slice(GIVEN);
  const rows = groups.filter((group) => !rest.includes(group)).map((group) => {
    const [number, size] = group[0];
    const { what, place: line, color, home } = tensor(number);
    const name = home === null ? what : valueButton(home, what);
    const times = group.length > 1 ? `${group.length} x ` : "";
    return heldRow(color, size * group.length, times, name, ...(line ? [element("small", "", line)] : []));
  });
  if (rest.length) {
    const every = rest.flat();
    rows.push(heldRow("arguments", every.reduce((sum, [, size]) => sum + size, 0), `${every.length} more arguments`));
  }
  if (point.more) rows.push(heldRow("", point.more[1], `in ${point.more[0]}`));
  const about = [element("p", "hint", step + (at === panel.peak ? ", the peak" : "")), element("p", "", "while computing " + point.what)];
  if (at === 0 && !point.place) about[1].textContent = point.what;
  if (point.place) about.push(element("p", "hint", point.place));
  if (point.loops.length) about.push(element("p", "hint", "inside the loop over " + point.loops.join(", over ")));
  show(`${bytes(point.nbytes)} held`, keepHash ? "" : `${panel.which}-${at}`, ...about, composition(point), ...rows);
}

function pointAt(plot, x) {
  const box = plot.getBoundingClientRect();
  const first = order.findIndex((found) => found.panel.which === plot.dataset.panel);
  const many = data.points[plot.dataset.panel].length;
  return first + Math.min(many - 1, Math.max(0, Math.floor((many * (x - box.left)) / box.width)));
}

function tip(plot, place) {
  const { panel, at } = order[place];
  const point = data.points[panel.which][at];
  const shown = element("div", "tip", element("b", "", bytes(point.nbytes)), element("div", "", point.what));
  for (const [number, size] of [...point.held].sort((a, b) => b[1] - a[1]).slice(0, 4)) {
    const { what, color } = tensor(number);
    shown.append(element("div", "", element("i", "chip " + color), bytes(size) + "  " + what));
  }
  if (point.place) shown.append(element("small", "", point.place));
  shown.style[at < data.points[panel.which].length / 2 ? "right" : "left"] = "0";
  shown.setAttribute("aria-hidden", "true");
  closeTips();
  plot.append(shown);
}

function closeTips() {
  document.querySelectorAll(".tip").forEach((shown) => shown.remove());
}

for (const plot of document.querySelectorAll(".plot")) {
  plot.addEventListener("pointermove", (event) => event.pointerType === "mouse" && tip(plot, pointAt(plot, event.clientX)));
  plot.addEventListener("pointerleave", closeTips);
  plot.addEventListener("click", (event) => showPoint(pointAt(plot, event.clientX)));
}
const plotOf = (place) => document.querySelector(`.plot[data-panel="${order[place].panel.which}"]`);
slider.addEventListener("input", () => {
  showPoint(+slider.value);
  tip(plotOf(+slider.value), +slider.value);
});
slider.addEventListener("focus", () => slider.matches(":focus-visible") && tip(plotOf(+slider.value), +slider.value));
slider.addEventListener("blur", closeTips);

// --- e-classes

function valueButton(id, text) {
  const made = element("button", "value", text);
  made.dataset.class = id;
  return made;
}

// "{7}" in the text of a node stands for class 7.
function nodeText(text) {
  return text.split(/(\{\d+\})/).map((part) => {
    const found = /^\{(\d+)\}$/.exec(part);
    return found ? valueButton(found[1], data.classes[found[1]]?.name ?? "c" + found[1]) : part;
  });
}

// The first place of the class comes into sight in every program but the one that was clicked in.
function reveal(clicked) {
  for (const program of document.querySelectorAll("pre")) {
    const first = program.querySelector(".same");
    if (first && !program.contains(clicked)) program.scrollTop = first.offsetTop - program.offsetTop - program.clientHeight / 3;
  }
}

function showClass(id, clicked) {
  const found = data.classes[id];
  document.querySelectorAll(".same").forEach((e) => e.classList.remove("same"));
  document.querySelectorAll(`main [data-class="${id}"]`).forEach((e) => e.classList.add("same"));
  reveal(clicked);
  const about = [element("p", "", `${found.type}, ${found.bytes} whole`)];
  const words = { splits: "may be computed slice by slice along", accumulates: "may be accumulated over", unrolls: "may be written out over" };
  for (const [fact, indices] of Object.entries(found.facts)) about.push(element("p", "hint", `${words[fact] || fact} ${indices}`));
  const count = found.nodes.length + found.more;
  about.push(element("h3", "", count === 1 ? "One way to compute it" : `${count} ways to compute it`));
  for (const node of found.nodes) {
    const says = [node.cost, node.chosen && "in the plan", node.written && "as written"].filter(Boolean).join(", ");
    about.push(element("div", node.chosen ? "node chosen" : "node", ...nodeText(node.text), element("small", "", says)));
  }
  if (found.more) about.push(element("p", "hint", `and ${found.more} dearer ones`));
  show(`e-class c${id}` + (found.name === "c" + id ? "" : `: ${found.name}`), "c" + id, ...about);
}

document.addEventListener("click", (event) => {
  const value = event.target.closest("[data-class]");
  if (value) showClass(value.dataset.class, value);
});

// Each program is one stop of the tab key; arrow keys go through its values.
for (const program of document.querySelectorAll("pre")) {
  const values = [...program.querySelectorAll("button.value")];
  program.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !values.length) return;
    event.preventDefault();
    const at = values.indexOf(document.activeElement);
    values[at < 0 ? 0 : Math.min(values.length - 1, Math.max(0, at + step))].focus();
  });
}

// --- the emitted source

const emitted = document.getElementById("emitted");
const said = document.getElementById("said");
document.getElementById("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(emitted.textContent);
    said.textContent = "copied";
  } catch {
    getSelection().selectAllChildren(emitted);
    said.textContent = document.execCommand("copy") ? "copied" : "selected: copy it with the keyboard";
  }
});
document.getElementById("download").addEventListener("click", () => {
  const link = element("a", "");
  link.href = URL.createObjectURL(new Blob([emitted.textContent], { type: "text/x-python" }));
  link.download = emitted.dataset.file;
  link.click();
  URL.revokeObjectURL(link.href);
  said.textContent = "written as " + link.download;
});

// --- what the address names

function follow() {
  const point = /^#(\w+)-(\d+)$/.exec(location.hash);
  const place = point ? order.findIndex((found) => found.panel.which === point[1] && found.at === +point[2]) : -1;
  const id = /^#c(\d+)$/.exec(location.hash)?.[1];
  if (place >= 0) showPoint(place);
  else if (id in data.classes) showClass(id, null);
}
showPoint(+slider.value, true);
detail.parentElement.open = !matchMedia("(max-width: 60rem)").matches;
follow();
addEventListener("hashchange", follow);
