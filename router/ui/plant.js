// The pools, the readings above them, and the matrix between them.

import { differences, duration, get, h, keyed, plural, short, svg, table, text } from "./dom.js";

const POINTS = 240; // of a reading's line, two a second
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
  const output = sum(decode, (l) => l.tokens_per_s), prompts = sum(prefill, (l) => l.tokens_per_s);
  const told = [
    ["In flight", state.active, "", `of at most ${about.max_active}`, state.active],
    ["First token", first, unit, firsts.length ? `median; p95 ${duration(slow)}` : "no answer yet", middle ?? 0],
    ["Output", short(output), "tok/s", `${plural(sum(decode, (l) => l.running), "stream")} running`, output],
    ["Prompts", short(prompts), "tok/s", `${short(sum(state.workers, (l) => l.queued_prefill_tokens))} tokens waiting`, prompts],
    ["Decode pages", pages ? Math.round((100 * held) / pages) : "–", pages ? "%" : "", pages ? `${held} of ${pages}, ${sum(decode, (l) => l.pages_cached)} cached` : "no pool", pages ? held / pages : 0],
    ["Failed", failed, "", `of the last ${plural(ended.length, "request")}`, failed],
  ];
  keyed(get("readings"), readings, told.map(([name]) => name), makeReading);
  for (const [name, value, of, note, point] of told) readings.get(name).show(String(value), of, note, point, name === "Failed" && failed > 0);
}

function makeReading(name) {
  const number = document.createTextNode(""), unit = h("span"), note = h("p"), line = svg("polyline"), value = h("dd", {}, number, unit), points = [];
  const graph = svg("svg", { viewBox: "0 0 240 26", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("line", { x1: 0, y1: 26, x2: 240, y2: 26 }), line);
  const node = h("div", { class: "reading" }, h("dl", {}, h("dt", {}, name), value), note, graph);
  return { node, show(told, of, more, point, bad) {
    text(number, told); text(unit, of); text(note, more);
    value.classList.toggle("bad", bad);
    points.push(point);
    if (points.length > POINTS) points.shift();
    const top = Math.max(...points) || 1;
    line.setAttribute("points", points.map((p, at) => `${POINTS - points.length + at + 1},${(25 - (23 * p) / top).toFixed(1)}`).join(" "));
  } };
}

export function showPools(state) {
  for (const role of ["prefill", "decode"]) {
    const workers = state.workers.filter((worker) => worker.role === role), place = get(role);
    const all = workers.map(facts), common = (all[0] ?? []).filter((fact) => all.every((some) => some.includes(fact)));
    text(get(`${role}-name`).querySelector("small"), workers.length ? plural(workers.length, "worker") : "");
    text(get(`${role}-facts`), inline(common));
    if (!workers.length) {
      pools[role].clear();
      place.replaceChildren(nobody(role, state.workers.length));
      continue;
    }
    if (!place.querySelector("table")) place.replaceChildren(table(["worker", "state", "run", "wait", "pages", "tok/s", "apart"], "workers"));
    keyed(place.querySelector("tbody"), pools[role], workers.map((worker) => worker.id), makeWorker);
    workers.forEach((worker, at) => pools[role].get(worker.id).show(worker, all[at].filter((fact) => !common.includes(fact))));
  }
}

const inline = (some) => some.map((fact) => fact.replaceAll(" ", "\u00a0")).join(" · ");

/** What a worker is. Those that all of a pool share are told once, above it. */
function facts({ model, device, dtypes: [kv, weights], info, adapters, takes_prompts: alone, pages: [size] }) {
  const told = [model, device, kv === weights ? kv : `${weights}, KV ${kv}`, `pages of ${size}`, info.kernels && `kernels ${info.kernels}`, info.deterministic === "true" && "deterministic",
    info.pdserve && `pdserve ${info.pdserve}`, info.torch && `torch ${info.torch.split("+")[0]}`, adapters.length && `adapters ${adapters.join(", ")}`, alone && "computes prompts, too"];
  return told.filter(Boolean);
}

function nobody(role, others) {
  if (others) return h("p", { class: "empty" }, `No ${role} worker is here. `, h("code", {}, `python -m ${role}_worker`), " starts one.");
  return h("p", { class: "empty" }, "No workers yet. ", h("code", {}, "pdserve up"), " starts two pools and a router on this machine.");
}

function makeWorker(id) {
  const cell = (name, ...parts) => h("td", { role: "cell", "data-name": name }, ...parts), [running, waiting, count, rate, more] = Array.from({ length: 5 }, () => h("span"));
  const held = svg("rect", { class: "held", height: 5 }), cached = svg("rect", { class: "cached", height: 5 });
  const state = cell(false), apart = h("td", { role: "cell", class: "apart" });
  const meter = svg("svg", { class: "meter", viewBox: "0 0 100 5", preserveAspectRatio: "none", "aria-hidden": "true" }, cached, held);
  const name = h("th", { scope: "row", role: "rowheader", class: "id" }, id);
  const node = h("tr", { role: "row" }, name, state, cell("run", running), cell("wait", waiting), cell("pages", count, meter), cell("tok/s", rate, h("small", {}, more)), apart);
  return { node, show(worker, own) {
    const load = worker.load, of = (part) => (load.pages_total ? Math.min(100, (100 * part) / load.pages_total) : 0);
    name.title = `${worker.address}, contract ${worker.contract}`;
    state.className = `state ${worker.state}`;
    text(state, worker.state);
    text(running, String(load.running));
    text(waiting, String(load.waiting));
    text(count, `${load.pages_held} / ${load.pages_total}`);
    held.setAttribute("width", of(load.pages_held));
    cached.setAttribute("width", of(load.pages_held + load.pages_cached));
    text(rate, short(load.tokens_per_s));
    text(more, load.transfer_bytes_per_s ? `${short(load.transfer_bytes_per_s)}B/s` : load.decode_step_ms ? `step ${duration(load.decode_step_ms)}` : "");
    text(apart, inline(own));
  } };
}

const names = (kind) => `${kind.ids.join(", ")}${kind.count > kind.ids.length ? ` and ${kind.count - kind.ids.length} more` : ""}`;

export function showMatrix(matrix, about) {
  const { rows, columns, cells } = matrix, place = get("matrix");
  get("plant").classList.toggle("wide", columns.length > 3);
  const told = [], note = { never: "This router hands nothing over: decode workers compute prompts.", auto: "A decode worker may also compute a prompt itself, where that is cheaper." }[about.disaggregate];
  if (!rows.length || !columns.length) {
    place.replaceChildren(h("p", { class: "quiet" }, "A pair needs a worker of each pool."));
  } else {
    const head = h("tr", {}, h("td"), ...columns.map((kind) => h("th", { scope: "col", class: "id" }, names(kind))));
    const body = rows.map((row, r) => h("tr", {}, h("th", { scope: "row", class: "id" }, names(row)), ...columns.map((column, c) => {
      const { verdict, differences: found } = cells[r][c], id = `pair-${r}-${c}`;
      if (found.length) told.push({ id, title: `${names(row)} → ${names(column)}`, verdict, found });
      return h("td", { class: verdict }, found.length ? h("a", { href: `#${id}` }, verdict) : h("span", {}, verdict));
    })));
    place.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, ...body)), h("p", { class: "quiet" }, note ?? ""));
  }
  get("reasons").hidden = !told.length;
  get("reasons").replaceChildren(...told.map(({ id, title, verdict, found }) => h("article", { id, tabindex: "-1" },
    h("h3", {}, h("span", { class: "id" }, title), " ", h("span", { class: verdict === "refused" ? "bad" : "quiet" }, verdict)), differences(found))));
}
