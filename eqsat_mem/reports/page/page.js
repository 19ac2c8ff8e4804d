"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const detail = document.getElementById("detail");

// Text goes in as text, never as markup.
function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

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
  detail.replaceChildren(element("h2", "", `e-class c${id}` + (found.name === "c" + id ? "" : `: ${found.name}`)), element("p", "", `${found.type}, ${found.bytes} whole`));
  const words = { splits: "may be computed slice by slice along", accumulates: "may be accumulated over", unrolls: "may be written out over" };
  for (const [fact, indices] of Object.entries(found.facts)) detail.append(element("p", "hint", `${words[fact] || fact} ${indices}`));
  const count = found.nodes.length + found.more;
  detail.append(element("h3", "", count === 1 ? "One way to compute it" : `${count} ways to compute it`));
  for (const node of found.nodes) {
    const says = [node.cost, node.chosen && "in the plan", node.written && "as written"].filter(Boolean).join(", ");
    detail.append(element("div", node.chosen ? "node chosen" : "node", ...nodeText(node.text), element("small", "", says)));
  }
  if (found.more) detail.append(element("p", "hint", `and ${found.more} dearer ones`));
}

function showPoint(bar) {
  const point = data[bar.dataset.points][bar.dataset.point];
  document.querySelectorAll(".picked").forEach((e) => e.classList.remove("picked"));
  bar.classList.add("picked");
  detail.replaceChildren(element("h2", "", point.size), element("p", "", point.what));
  if (point.place) detail.append(element("p", "hint", point.place));
  if (point.loops.length) detail.append(element("p", "hint", "inside the loop over " + point.loops.join(", over ")));
  detail.append(element("h3", "", point.held.length ? "Held besides arguments" : "Nothing is held besides arguments"));
  for (const tensor of point.held) {
    const share = element("span", "");
    share.style.width = 100 * tensor.share + "%";
    const name = tensor.class === null ? tensor.what : valueButton(tensor.class, tensor.what);
    detail.append(element("div", "held", share, element("div", "", tensor.size + "  ", name)));
  }
}

function pick(target) {
  const value = target.closest("[data-class]");
  const bar = target.closest("[data-point]");
  if (value) showClass(value.dataset.class, value);
  else if (bar) showPoint(bar);
}

document.addEventListener("click", (event) => pick(event.target));
document.addEventListener("keydown", (event) => {
  if ((event.key === "Enter" || event.key === " ") && event.target.matches("rect")) {
    event.preventDefault();
    pick(event.target);
  }
});
