// The messages of a Push stream: bytes to objects, refusing what no message may be.

import { CONTRACT, IDENTITY } from "./contract.mjs";
import { Malformed, delimited, fields, message, unpackMap } from "./wire.mjs";

const MAX_FRAMES = 64; // what this receiver's grant says
export const ITEM = { fp32: 4, fp16: 2, bf16: 2, float64: 8 };
const KEYS = ["dtype", "heads", "layer", "plane", "seq", "tokens"];
const OPEN = {
  1: ["handoff_id", "bytes"], 2: ["attempt", "u32"], 3: ["incarnation", "bytes"], 4: ["proof", "bytes"],
  5: ["identity", { message: IDENTITY }], 6: ["contract", { message: CONTRACT }], 7: ["kv_dtype", "string"],
  8: ["logits_only", "bool"], 9: ["integrity", "string"],
};
const LOGITS = { 1: ["dtype", "string"], 2: ["data", "bytes"], 3: ["position", "u32"], 4: ["digest", "bytes"] };
const COMMIT = {
  1: ["frames", "u32"], 2: ["payload_bytes", "u64"], 3: ["start", "u32"], 4: ["end", "u32"], 5: ["digest", "bytes"],
};

export class Refusal extends Error {
  constructor(reason, differences = []) {
    super(reason);
    Object.assign(this, { reason, differences });
  }
}

export function need(holds, reason, differences = []) {
  if (!holds) throw new Refusal(reason, differences);
}

// What a malformed piece raises as, whatever was wrong with it.
export function reading(reason, read) {
  try {
    return read();
  } catch (error) {
    throw error instanceof Malformed ? new Refusal(reason) : error;
  }
}

// PushRequest{frame}: header, payload and digest, in this order, all present, and nothing else.
function readFrame(bytes) {
  const [frame, end] = delimited(bytes, 1, 5);
  let at = 0;
  const parts = [0x0a, 0x12, 0x1a].map((tag) => {
    need(frame[at] === tag, "MALFORMED_MESSAGE");
    const [part, next] = delimited(frame, at + 1, 5);
    at = next;
    return part;
  });
  need(end === bytes.length && at === frame.length && parts[2].length === 32, "MALFORMED_MESSAGE");
  return { kind: "frame", header: parts[0], payload: parts[1], digest: parts[2] };
}

// PushRequest{frames}: a frame for each of its parts, and nothing else.
function readFrames(bytes) {
  const [body, end] = delimited(bytes, 1, 5);
  const frames = [];
  for (let at = 0; at < body.length; ) {
    need(body[at] === 0x0a, "MALFORMED_MESSAGE");
    const [, next] = delimited(body, at + 1, 5);
    frames.push(readFrame(body.subarray(at, next)));
    at = next;
  }
  need(end === bytes.length && frames.length > 0 && frames.length <= MAX_FRAMES, "MALFORMED_MESSAGE");
  return { kind: "frames", frames };
}

export function readMessage(bytes) {
  if (bytes[0] === 0x12) return readFrame(bytes);
  if (bytes[0] === 0x32) return readFrames(bytes);
  const schema = { 0x0a: ["open", OPEN], 0x1a: ["logits", LOGITS], 0x22: ["commit", COMMIT] }[bytes[0]];
  need(schema !== undefined, "MALFORMED_MESSAGE");
  const members = [...fields(bytes)].filter(([number, type]) => number <= 4 && type === 2);
  need(members.length > 0 && members.every(([number]) => number === bytes[0] >> 3), "MALFORMED_MESSAGE");
  const [kind, layout] = schema;
  const out = { kind, ...message(members.at(-1)[2], layout) };
  if (kind === "open") {
    need(out.identity !== null && out.contract !== null && out.proof.length === 32, "MALFORMED_MESSAGE");
    checkIdentity(out.identity);
    checkContract(out.contract);
  } else {
    need(out.digest.length === 32, "MALFORMED_MESSAGE");
  }
  return out;
}

const length = (value) => [...value].length; // in characters
const named = (value) => length(value) >= 1 && length(value) <= 256;

function checkIdentity(i) {
  const digests = [i.contract_digest, i.prompt_digest, ...(i.adapter_digest === null ? [] : [i.adapter_digest])];
  const fits = digests.every((digest) => digest.length === 32) && i.start <= i.end && i.end > 0;
  need(fits && length(i.tenant) <= 256, "MALFORMED_IDENTITY");
}

function checkContract(c) {
  const check = (holds) => need(holds, "MALFORMED_CONTRACT");
  check(c.positions !== null && c.attention !== null);
  check(c.layers.length >= 1 && c.layers.length <= 4096 && c.info.size <= 256);
  const planesInAll = c.layers.reduce((sum, { planes }) => sum + planes.length, 0);
  check(planesInAll >= 1 && planesInAll <= 4096);
  check(c.model_digest.length === 32 && [0, 32].includes(c.tokenizer_digest.length));
  check([c.version, c.vocab_size, c.page_size].every((number) => number >= 1));
  for (const scheme of [c.positions, ...c.layer_positions]) {
    const parameters = scheme.scaling_parameters;
    check(["rope", "learned", "alibi", "none"].includes(scheme.kind) && parameters.size <= 256);
    check([scheme.theta, ...parameters.values()].every(Number.isFinite));
    check([scheme.scaling, ...parameters.keys()].every(named));
  }
  check([c.attention.scale, c.attention.soft_cap].every(Number.isFinite));
  check([0, c.layers.length].includes(c.layer_positions.length));
  check([0, c.layers.length].includes(c.attention.sliding_window.length));
  check(["hnd", "nhd"].includes(c.page_axis_order) && c.kv_dtype in ITEM);
  check([c.device, c.weight_dtype, c.activation_dtype, ...c.info.keys()].every(named));
  check([...c.info.values()].every((value) => length(value) <= 4096));
  for (const { planes } of c.layers) {
    check(planes.length <= 16 && new Set(planes.map((p) => p.name)).size === planes.length);
    check(planes.every((p) => named(p.name) && p.heads >= 1 && p.heads <= 65536));
    check(planes.every((p) => p.head_dim >= 1 && p.head_dim <= 2 ** 20));
  }
}

export function readHeader(bytes) {
  need(bytes.length <= 256, "FRAME_HEADER");
  const pairs = reading("FRAME_HEADER", () => unpackMap(bytes));
  const names = pairs.map(([name]) => String(name)).sort();
  need(names.length === 6 && names.every((name, i) => name === KEYS[i]), "FRAME_HEADER");
  const header = Object.fromEntries(pairs);
  const count = (value) => typeof value === "bigint" && value >= 0n && value < 2n ** 32n;
  const range = (value) => Array.isArray(value) && value.length === 2 && value.every(count) && value[0] < value[1];
  need(typeof header.plane === "string" && typeof header.dtype === "string", "FRAME_HEADER");
  need(count(header.layer) && count(header.seq) && range(header.heads) && range(header.tokens), "FRAME_HEADER");
  return {
    plane: header.plane, dtype: header.dtype, layer: Number(header.layer), seq: Number(header.seq),
    heads: header.heads.map(Number), tokens: header.tokens.map(Number),
  };
}
