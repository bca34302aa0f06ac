// Building blocks. Whatever comes from the router goes into text nodes and attributes: a name is never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element; properties whose names begin with "on" are listeners. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null));
  return element;
}

export const get = (id) => document.getElementById(id);

/** Changes a text only where it differs, so that what somebody has selected stays selected. */
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

/** Puts into `parent` the nodes that `make(key)` gave, in this order, each made once and kept under its key. */
export function keyed(parent, kept, keys, make) {
  for (const key of kept.keys()) if (!keys.includes(key)) kept.delete(key);
  keys.forEach((key, at) => {
    if (!kept.has(key)) kept.set(key, make(key));
    const node = kept.get(key).node;
    if (parent.children[at] !== node) parent.insertBefore(node, parent.children[at] ?? null);
  });
  while (parent.children.length > keys.length) parent.lastChild.remove();
}

export function duration(ms) {
  if (ms >= 60000) return `${Math.floor(ms / 60000)} min ${String(Math.floor((ms % 60000) / 1000)).padStart(2, "0")} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}

/** 1234 as 1.2 k, for rates and sizes. */
export function short(value) {
  const units = ["", "k", "M", "G", "T"];
  let at = 0;
  while (value >= 1000 && at + 1 < units.length) [value, at] = [value / 1000, at + 1];
  return `${value >= 100 || Number.isInteger(value) ? Math.round(value) : value.toFixed(1)}${at ? ` ${units[at]}` : ""}`;
}

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });

/** With explicit roles: a phone's layout would take them away. */
export function table(heads, kind = false) {
  const cells = heads.map((name) => h("th", { scope: "col", role: "columnheader" }, name));
  return h("table", { class: kind, role: "table" }, h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ...cells)), h("tbody", { role: "rowgroup" }));
}

export function differences(found) {
  const row = (d) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, d.code), " ", h("small", {}, d.kind.replace("_", " "))), h("td", {}, d.left), h("td", {}, d.right));
  const head = ["field", "prefill", "decode"].map((name) => h("th", { scope: "col" }, name));
  return h("table", { class: "differences" }, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...found.map(row)));
}
