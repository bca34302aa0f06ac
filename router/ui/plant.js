// The pools, the readings above them, and the matrix between them.

import { differences, duration, get, h, keyed, plural, short, svg, text } from "./dom.js";

const POINTS = 120; // of a reading's line, one a second
const history = new Map();
const pools = { prefill: new Map(), decode: new Map() };
const readings = new Map();

const sum = (workers, of) => workers.reduce((total, worker) => total + of(worker.load), 0);

/** @param ended requests that have ended, newest first */
export function showReadings(state, about, ended) {
  const prefill = state.workers.filter((w) => w.role === "prefill"), decode = state.workers.filter((w) => w.role === "decode");
  const firsts = ended.filter((r) => r.first_token_ms).map((r) => r.first_token_ms).sort((a, b) => a - b);
  const middle = firsts[Math.floor(firsts.length / 2)], slow = firsts[Math.floor(firsts.length * 0.95)];
  const pages = sum(decode, (l) => l.pages_total), held = sum(decode, (l) => l.pages_held);
  const failed = ended.filter((r) => r.state === "failed" || r.state === "refused").length;
  const [first, unit] = firsts.length ? duration(middle).split(/ (?=\S+$)/) : ["–", ""];
  const told = [
    ["In flight", state.active, "", `of at most ${about.max_active}`, state.active],
    ["First token", first, unit, firsts.length ? `median of ${firsts.length}, 95 % within ${duration(slow)}` : "no answer yet", middle ?? 0],
    ["Output", short(sum(decode, (l) => l.tokens_per_s)), "tok/s", `${plural(sum(decode, (l) => l.running), "stream")} running`, sum(decode, (l) => l.tokens_per_s)],
    ["Prompts", short(sum(prefill, (l) => l.tokens_per_s)), "tok/s", `${short(sum(state.workers, (l) => l.queued_prefill_tokens))} tokens waiting`, sum(prefill, (l) => l.tokens_per_s)],
    ["Decode pages", pages ? Math.round((100 * held) / pages) : "–", pages ? "%" : "", pages ? `${held} of ${pages} held, ${sum(decode, (l) => l.pages_cached)} cached` : "no pool", pages ? held / pages : 0],
    ["Failed", failed, "", `of the last ${plural(ended.length, "request")}`, failed],
  ];
  keyed(get("readings"), readings, told.map(([name]) => name), makeReading);
  for (const [name, value, of, note, point] of told) readings.get(name).show(String(value), of, note, point, name === "Failed" && failed > 0);
}

function makeReading(name) {
  const number = document.createTextNode(""), unit = h("span"), note = h("p"), line = svg("polyline"), value = h("dd", {}, number, unit);
  const graph = svg("svg", { viewBox: "0 0 120 26", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("line", { x1: 0, y1: 26, x2: 120, y2: 26 }), line);
  const node = h("div", { class: "reading" }, h("dl", {}, h("dt", {}, name), value), note, graph);
  history.set(name, []);
  return { node, show(told, of, more, point, bad) {
    text(number, told); text(unit, of); text(note, more);
    value.classList.toggle("bad", bad);
    const points = history.get(name);
    points.push(point);
    if (points.length > POINTS) points.shift();
    const top = Math.max(...points) || 1;
    line.setAttribute("points", points.map((p, at) => `${POINTS - points.length + at + 1},${(25 - (23 * p) / top).toFixed(1)}`).join(" "));
  } };
}

export function showPools(state) {
  for (const role of ["prefill", "decode"]) {
    const workers = state.workers.filter((worker) => worker.role === role), place = get(role);
    const models = new Set(workers.map((worker) => worker.model));
    text(get(`${role}-name`).querySelector("small"), workers.length ? `${plural(workers.length, "worker")}${models.size > 1 ? `, ${models.size} models` : ""}` : "");
    if (!workers.length) {
      pools[role].clear();
      place.replaceChildren(nobody(role, state.workers.length));
      continue;
    }
    if (!place.querySelector("table")) place.replaceChildren(table());
    keyed(place.querySelector("tbody"), pools[role], workers.map((worker) => worker.id), makeWorker);
    for (const worker of workers) pools[role].get(worker.id).show(worker);
  }
}

function nobody(role, others) {
  if (others) return h("p", { class: "empty" }, `No ${role} worker is here. `, h("code", {}, `python -m ${role}_worker`), " starts one.");
  return h("p", { class: "empty" }, "No workers yet. ", h("code", {}, "pdserve up"), " starts two pools and a router on this machine.");
}

function table() {
  const head = [["worker"], ["state"], ["queue", "n"], ["pages", ""], ["rate", "n"]].map(([name, kind]) => h("th", { scope: "col", class: kind || false }, name));
  return h("table", { class: "workers", role: "table" }, h("thead", {}, h("tr", { role: "row" }, ...head)), h("tbody"));
}

function makeWorker(id) {
  const about = h("small"), state = h("td", { role: "cell" }), queue = text2("n"), pages = h("td", { role: "cell" }), rate = text2("n");
  const held = svg("rect", { class: "held", height: 5 }), cached = svg("rect", { class: "cached", height: 5 }), count = h("span");
  pages.append(count, svg("svg", { class: "meter", viewBox: "0 0 100 5", preserveAspectRatio: "none", "aria-hidden": "true" }, cached, held));
  const node = h("tr", { role: "row" }, h("th", { scope: "row", role: "rowheader" }, h("span", { class: "id" }, id), about), state, queue.cell, pages, rate.cell);
  return { node, show(worker) {
    const load = worker.load, [kv, weights] = worker.dtypes, info = worker.info;
    const parts = [worker.model, worker.device, kv === weights ? kv : `${weights}, KV ${kv}`, info.kernels && `kernels ${info.kernels}`, info.pdserve && `pdserve ${info.pdserve}`,
      info.torch && `torch ${info.torch.split("+")[0]}`, worker.adapters.length && `adapters ${worker.adapters.join(", ")}`, worker.takes_prompts && "computes prompts, too"];
    text(about, parts.filter(Boolean).join(" · "));
    about.title = `${worker.address}, contract ${worker.contract}`;
    state.className = `state ${worker.state}`;
    text(state, worker.state);
    queue.show(`${load.running} + ${load.waiting}`, `of ${load.waiting_limit} waiting`);
    text(count, `${load.pages_held} / ${load.pages_total}`);
    const of = (part) => (load.pages_total ? (100 * part) / load.pages_total : 0);
    held.setAttribute("width", of(load.pages_held));
    cached.setAttribute("width", of(Math.min(load.pages_total, load.pages_held + load.pages_cached)));
    const more = worker.role === "prefill" ? load.transfer_bytes_per_s && `${short(load.transfer_bytes_per_s)}B/s sent` : load.decode_step_ms && `step ${duration(load.decode_step_ms)}`;
    rate.show(`${short(load.tokens_per_s)} tok/s`, more || "");
  } };
}

function text2(kind) {
  const first = h("span"), second = h("small"), cell = h("td", { class: kind, role: "cell" }, first, second);
  return { cell, show(one, two) { text(first, one); text(second, two); } };
}

const WORDS = { fits: "fits", converts: "converts", lossy: "lossy", refused: "refused" };
const names = (kind) => `${kind.ids.join(", ")}${kind.count > kind.ids.length ? ` and ${kind.count - kind.ids.length} more` : ""}`;

export function showMatrix(matrix, about) {
  const { rows, columns, cells } = matrix, place = get("matrix");
  get("plant").classList.toggle("wide", columns.length > 3);
  const told = [];
  const notes = [];
  if (about.disaggregate !== "always") notes.push(about.disaggregate === "never" ? "This router hands nothing over: decode workers compute prompts." : "A decode worker may also compute a prompt itself, where that is cheaper.");
  if (!rows.length || !columns.length) {
    place.replaceChildren(h("p", { class: "quiet" }, "A pair needs a worker of each pool."));
  } else {
    const head = h("tr", {}, h("td", { class: "quiet" }), ...columns.map((kind) => h("th", { scope: "col", class: "id" }, names(kind))));
    const body = rows.map((row, r) => h("tr", {}, h("th", { scope: "row", class: "id" }, names(row)), ...columns.map((column, c) => {
      const { verdict, differences: found } = cells[r][c], id = `pair-${r}-${c}`;
      if (found.length) told.push({ id, title: `${names(row)} → ${names(column)}`, verdict, found });
      return h("td", { class: verdict }, found.length ? h("a", { href: `#${id}` }, WORDS[verdict]) : h("span", {}, WORDS[verdict]));
    })));
    head.firstChild.textContent = "↓ prefill, decode →";
    place.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, ...body)), ...notes.map((note) => h("p", { class: "quiet" }, note)));
  }
  get("reasons").hidden = !told.length;
  get("reasons").replaceChildren(...told.map(({ id, title, verdict, found }) => h("article", { id, tabindex: "-1" },
    h("h2", {}, h("span", { class: "id" }, title), " ", h("span", { class: verdict === "refused" ? "bad" : "quiet" }, WORDS[verdict])), differences(found))));
}
