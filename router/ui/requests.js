// The last requests as waterfalls, and one request's decision record.

import { ask } from "./feed.js";
import { clock, differences, duration, get, h, keyed, plural, short, svg, text } from "./dom.js";

const SHOWN = 200;
const STAGES = ["queued", "prefill", "transfer", "first token", "decode"];
const requests = new Map();
const rows = new Map();
let opened = "";

const kind = (stage) => stage.replace(" ", "-");
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
  const order = inOrder().slice(0, SHOWN), place = get("list");
  for (const id of requests.keys()) if (requests.size > SHOWN && !order.some((request) => request.id === id)) requests.delete(id);
  const running = order.filter((request) => request.state === "running").length;
  text(get("requests-name").querySelector("small"), order.length ? `${order.length}${running ? `, ${running} running` : ""}` : "");
  if (!order.length) {
    place.replaceChildren(h("p", { class: "empty" }, "No request yet. ", h("code", {}, 'pdserve generate --chat "What is the capital of France?"'), " sends one."));
    return;
  }
  if (!place.querySelector("table")) {
    rows.clear();
    const heads = [["began"], ["outcome"], ["model"], ["way"], ["tokens", "n"], ["first token", "n"], ["in all", "n"], ["stages", "fall"]];
    place.replaceChildren(h("table", { role: "table" }, h("thead", {}, h("tr", { role: "row" }, ...heads.map(([name, of]) => h("th", { scope: "col", class: of || false }, name)))), h("tbody")));
  }
  keyed(place.querySelector("tbody"), rows, order.map((request) => request.id), makeRow);
  const scale = Math.max(...order.map((request) => request.total_ms), 1);
  for (const request of order) rows.get(request.id).show(request, scale, about);
  if (opened && changed.some((request) => request.id === opened) && get("decision").open) open(opened);
}

function makeRow(id) {
  const cells = Array.from({ length: 8 }, (_, at) => h("td", { role: "cell", class: at === 7 ? "fall" : at > 3 ? "n" : false }));
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
    text(cells[2], about.tenants ? `${request.model} · ${request.tenant}` : request.model);
    text(cells[3], way(request));
    cells[3].className = "id";
    text(cells[4], `${request.prompt_tokens} → ${request.output_tokens}`);
    text(cells[5], request.first_token_ms ? duration(request.first_token_ms) : "–");
    text(cells[6], duration(request.total_ms));
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

async function open(id) {
  const dialog = get("decision");
  opened = id;
  let content;
  try {
    content = decision(await (await ask(`requests/${encodeURIComponent(id)}`)).json());
  } catch (error) {
    content = [h("p", { class: "bad" }, error.message)];
  }
  if (opened !== id) return;
  const top = dialog.scrollTop, raw = dialog.querySelector("details")?.open;
  const title = h("h2", { id: "decision-name", tabindex: "-1", autofocus: true }, "Request ", h("span", { class: "id" }, id));
  const close = h("button", { type: "button", onclick: () => dialog.close() }, "Close");
  dialog.replaceChildren(h("div", { class: "bar" }, title, close), ...content);
  if (raw) dialog.querySelector("details").open = true;
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = top;
}

export function closing() {
  const dialog = get("decision");
  dialog.addEventListener("close", () => { opened = ""; });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
}

function decision(request) {
  const record = request.record, last = record.history.at(-1);
  const parts = [
    h("p", { class: "quiet" }, `${request.model}, tenant ${request.tenant}, began ${clock(request.began_s)}${request.label ? `, called ${request.label}` : ""}`),
    h("p", { class: `state ${request.state}` }, request.outcome || "running", request.total_ms ? ` after ${duration(request.total_ms)}` : ""),
    h("h3", {}, "Stages"), stair(request),
  ];
  if (last) parts.push(h("h3", {}, "Placement"), placement(last));
  if (record.attempts > 1 || record.history.some((attempt) => attempt.failed_worker)) parts.push(h("h3", {}, "Attempts"), h("ul", {}, ...record.history.map(attempt)));
  if (record.candidates.length) parts.push(h("h3", {}, "Pairs that fit"), h("ul", {}, ...record.candidates.map(group)));
  if (record.rejected.length) parts.push(h("h3", {}, "Pairs refused"), h("ul", {}, ...record.rejected.map(group)));
  if (last) parts.push(h("h3", {}, "What it took"), figures(record));
  if (record.conversions.length) parts.push(h("h3", {}, "Converted on the way"), differences(record.conversions));
  if (record.notes.length) parts.push(h("h3", {}, "Notes"), h("ul", {}, ...record.notes.map((note) => h("li", {}, note))));
  parts.push(h("details", {}, h("summary", {}, "The whole record"), h("pre", {}, JSON.stringify(record, null, 1))));
  return parts;
}

function stair(request) {
  const many = request.record.history.length > 1, scale = Math.max(request.total_ms, 1e-3);
  const rows = request.stages.map((stage) => h("tr", {}, h("th", { scope: "row" }, stage[0], many ? ` (${stage[3] + 1})` : ""), h("td", { class: "fall" }, track([stage], scale)), h("td", { class: "n" }, duration(stage[2]))));
  return rows.length ? h("table", { class: "stair" }, h("tbody", {}, ...rows)) : h("p", { class: "quiet" }, "No worker was asked.");
}

const REASONS = { mode: "the router's mode leaves no choice", only: "no prefill worker was left", refused: "no prefill worker could take it", cheaper: "predicted to be the cheaper way", unmeasured: "not enough was measured yet to predict" };

function placement(last) {
  const who = last.placement === "decode" ? `${last.decode_worker} computed the prompt itself` : `${last.prefill_worker} handed over to ${last.decode_worker}`;
  const rows = [["chosen", `${who}: ${REASONS[last.placement_reason] ?? last.placement_reason}`], ["from", `${plural(last.prefill_candidates, "prefill worker")}, ${plural(last.decode_candidates, "decode worker")}`]];
  if (last.predicted_handoff_ms) rows.push(["handoff", `${duration(last.predicted_handoff_ms)} to the first token, predicted`]);
  if (last.predicted_decode_ms) rows.push(["at decode", `${duration(last.predicted_decode_ms)} predicted${last.decode_penalty_ms ? `, and ${duration(last.decode_penalty_ms)} for what others lose` : ""}`]);
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
  const title = g.prefill_count ? `${side(g.prefill_workers, g.prefill_count)} → ${side(g.decode_workers, g.decode_count)}` : "every pair";
  return h("li", {}, h("span", { class: "id" }, title), g.differences.length ? differences(g.differences) : null);
}
