// The last requests as waterfalls, and one request's decision record.

import { ask } from "./feed.js";
import { clock, differences, duration, get, h, keyed, plural, short, svg, table, text } from "./dom.js";

const KEPT = 250; // as many as the router tells of
const NAMES = { 4: "tokens", 5: "first token", 6: "in all" }; // on a phone each stands above its number
let shown = 40;
const STAGES = ["queued", "prefill", "transfer", "first token", "decode"];
const requests = new Map();
const rows = new Map();
let opened = "";

const kind = (stage) => stage.replace(" ", "-");
const titled = (title, ...some) => [h("h3", {}, title), ...some];
const items = (some) => h("ul", {}, ...some);
export const forget = () => requests.clear();

/** Newest first, those that run included. */
const inOrder = () => [...requests.values()].sort((a, b) => b.began_s - a.began_s);
export const ended = () => inOrder().filter((request) => request.state !== "running");

export function legend() {
  const mark = (stage) => svg("svg", { viewBox: "0 0 14 9", "aria-hidden": "true" }, svg("rect", { class: kind(stage), width: 14, height: 9 }));
  get("legend").replaceChildren(...[...STAGES, "lost"].map((stage) => h("li", {}, mark(stage), stage)));
}

export function take(changed, about) {
  for (const request of changed) requests.set(request.id, request);
  const all = inOrder(), order = all.slice(0, shown), place = get("list"), left = all.length - order.length;
  for (const request of all.slice(KEPT)) requests.delete(request.id);
  const running = all.filter((request) => request.state === "running").length;
  text(get("requests-name").querySelector("small"), running ? `${all.length}, ${running} running` : all.length ? String(all.length) : "");
  get("more").hidden = !left;
  text(get("more"), `Show ${left} more`);
  get("more").onclick = () => { shown = KEPT; take([], about); };
  if (!order.length) {
    place.replaceChildren(h("p", { class: "empty" }, "No request yet. ", h("code", {}, 'pdserve generate --chat "What is the capital of France?"'), " sends one."));
    return;
  }
  if (!place.querySelector("table")) {
    rows.clear();
    place.replaceChildren(table(["began", "outcome", about.tenants ? "model, tenant" : "model", "route", "tokens", "first token", "in all", "stages"]));
  }
  keyed(place.querySelector("tbody"), rows, order.map((request) => request.id), makeRow);
  const scale = Math.max(...order.map((request) => request.total_ms), 1);
  for (const request of order) rows.get(request.id).show(request, scale, about);
  if (changed.some((request) => request.id === opened)) show(opened);
}

function makeRow(id) {
  const cells = Array.from({ length: 8 }, (_, at) => h("td", { role: "cell", class: at === 7 ? "fall" : false, "data-name": NAMES[at] }));
  const button = h("button", { class: "open", type: "button" });
  cells[0].append(button);
  const node = h("tr", { role: "row", onclick: () => open(id) }, ...cells);
  let last = "";
  return { node, show(request, scale, about) {
    const now = JSON.stringify([request, scale]);
    if (now === last) return;
    last = now;
    text(button, clock(request.began_s));
    button.setAttribute("aria-label", `${clock(request.began_s)}: decision record of ${id}`);
    cells[1].className = `state ${request.state}`;
    text(cells[1], request.state === "running" ? "running" : request.outcome);
    text(cells[2], `${request.model || "–"}${about.tenants ? ` · ${request.tenant}` : ""}`);
    text(cells[3], way(request));
    cells[3].className = "id";
    text(cells[4], `${request.prompt_tokens} → ${request.output_tokens}`);
    text(cells[5], request.first_token_ms ? duration(request.first_token_ms) : "–");
    text(cells[6], request.total_ms ? duration(request.total_ms) : "–");
    cells[7].replaceChildren(track(request.stages, scale));
  } };
}

function way(request) {
  if (!request.decode) return "–";
  const again = request.attempts > 1 ? ` (${request.attempts} attempts)` : "";
  return request.here ? `${request.decode} alone${again}` : `${request.prefill} → ${request.decode}${again}`;
}

/** Bars on one line; each says its name and time to whoever points at it or cannot see it. */
function track(stages, scale) {
  const bars = stages.map(([name, start, ms]) => svg("rect", { class: kind(name), x: (1000 * start) / scale, width: Math.max(1.5, (1000 * ms) / scale), height: 14 },
    svg("title", {}, `${name} ${duration(ms)}`)));
  const told = stages.map(([name, , ms]) => `${name} ${duration(ms)}`).join(", ");
  return svg("svg", { class: "track", viewBox: "0 0 1000 14", preserveAspectRatio: "none", role: "img", "aria-label": told || "nothing yet" }, ...bars);
}

function open(id) {
  opened = id;
  text(get("decision-name").querySelector("span"), id);
  get("record").replaceChildren();
  get("decision").showModal();
  show(id);
}

async function show(id) {
  let content;
  try {
    content = decision(await (await ask(`requests/${encodeURIComponent(id)}`)).json());
  } catch (error) {
    content = [h("p", { class: "bad" }, error.message)];
  }
  if (opened !== id) return;
  const raw = get("record").querySelector("details")?.open;
  get("record").replaceChildren(...content);
  if (raw) get("record").querySelector("details").open = true;
}

export function closing() {
  const dialog = get("decision");
  get("close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => { opened = ""; });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
}

function decision(request) {
  const record = request.record, last = record.history.at(-1);
  const notes = record.notes.filter((note) => !record.rejected.length || !note.includes(" refused: ")); // told above them
  const failed = record.attempts > 1 || record.history.some((attempt) => attempt.failed_worker);
  return [
    h("p", { class: "quiet" }, `${request.model || "no model named"}, tenant ${request.tenant}, began ${clock(request.began_s)}${request.label ? `, called ${request.label}` : ""}`),
    h("p", { class: `state ${request.state}` }, request.outcome || "running", request.total_ms ? ` after ${duration(request.total_ms)}` : ""),
    ...titled("Stages", stair(request)),
    ...(last ? titled("Placement", placement(last)) : []),
    ...(failed ? titled("Attempts", items(record.history.map(attempt))) : []),
    ...(record.candidates.length ? titled("Pairs that fit", items(record.candidates.map(group))) : []),
    ...(record.rejected.length ? titled("Pairs refused", items(record.rejected.map(group))) : []),
    ...(last ? titled("What it took", figures(record)) : []),
    ...(record.conversions.length ? titled("Converted on the way", differences(record.conversions)) : []),
    ...(notes.length ? titled("Notes", items(notes.map((note) => h("li", {}, note)))) : []),
    h("details", {}, h("summary", {}, "The whole record"), h("pre", {}, JSON.stringify(record, null, 1))),
  ];
}

function stair(request) {
  const many = request.record.history.length > 1, scale = Math.max(request.total_ms, 1e-3);
  const rows = request.stages.map((stage) => h("tr", {}, h("th", { scope: "row" }, stage[0], many ? ` (${stage[3] + 1})` : ""), h("td", { class: "fall" }, track([stage], scale)), h("td", { class: "n" }, duration(stage[2]))));
  return rows.length ? h("table", { class: "stair" }, h("tbody", {}, ...rows)) : h("p", { class: "quiet" }, "No worker was asked.");
}

const REASONS = { mode: "the router's mode leaves no choice", only: "no prefill worker was left", refused: "no prefill worker could take it", cheaper: "predicted to be the cheaper way", unmeasured: "not enough was measured yet to predict" };

function placement(last) {
  const who = last.placement === "split" ? `${last.prefill_worker} computed ${last.handoff_tokens} tokens and ${last.decode_worker} the rest` : last.placement === "decode" ? `${last.decode_worker} computed the prompt itself` : `${last.prefill_worker} handed over to ${last.decode_worker}`;
  const rows = [["chosen", `${who}: ${REASONS[last.placement_reason] ?? last.placement_reason}`], ["from", `${last.placement === "decode" ? "" : `${plural(last.prefill_candidates, "prefill worker")}, `}${plural(last.decode_candidates, "decode worker")}`]];
  if (last.predicted_handoff_ms) rows.push(["handoff", `${duration(last.predicted_handoff_ms)} to the first token, predicted`]);
  if (last.predicted_decode_ms) rows.push(["at decode", `${duration(last.predicted_decode_ms)} predicted${last.decode_penalty_ms ? `, and ${duration(last.decode_penalty_ms)} for what others lose` : ""}`]);
  if (last.predicted_split_ms) rows.push(["split", `${duration(last.predicted_split_ms)} to the first token, predicted`]);
  if (last.first_token_ms) rows.push(["came", `${duration(last.first_token_ms)} after the choice`]);
  return list(rows);
}

function figures(r) {
  const rows = [["prompt", `${plural(r.prompt_tokens, "token")}, ${r.computed_tokens} computed, ${r.sent_tokens} sent`]];
  if (r.bytes_sent) rows.push(["sent", `${short(r.bytes_sent)}B in ${plural(r.frames_sent, "frame")}, ${duration(r.push_ms)} from grant to acknowledgement`]);
  rows.push(["worker's times", `waited ${duration(r.queued_ms)}, computed ${duration(r.prefill_ms)}, sent on for ${duration(r.transfer_ms)}`]);
  rows.push(["output", `${plural(r.output_tokens, "token")}${r.decode_tokens_per_s ? `, ${short(r.decode_tokens_per_s)} tok/s` : ""}`]);
  if (r.choices > 1) rows.push(["choices", `${r.choices}, ${r.shared_pages} pages read together, ${r.copied_pages} copied`]);
  return list(rows);
}

const list = (rows) => h("dl", {}, ...rows.flatMap(([name, told]) => [h("dt", {}, name), h("dd", {}, told)]));

function attempt(a, number) {
  const tokens = a.output_tokens ? `${plural(a.output_tokens, "token")}, then ` : "";
  return h("li", {}, `${number + 1}. `, h("span", { class: "id" }, `${a.prefill_worker} → ${a.decode_worker}`), `: ${tokens}`,
    h("span", { class: a.failed_worker ? "bad" : false }, a.failed_worker ? `${a.outcome} at ${a.failed_worker}` : a.outcome || "running"), a.total_ms ? ` after ${duration(a.total_ms)}` : "");
}

function group(g) {
  const side = (some, count) => `${some.join(", ")}${count > some.length ? ` and ${count - some.length} more` : ""}`;
  const from = side(g.prefill_workers, g.prefill_count), to = side(g.decode_workers, g.decode_count);
  const title = !g.prefill_count ? "every pair" : from === to ? `${to}, without a handoff` : `${from} → ${to}`;
  return h("li", {}, h("span", { class: "id" }, title), g.differences.length ? differences(g.differences) : null);
}
