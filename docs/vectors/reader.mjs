// A second reader of the handoff protocol, written from docs/protocol.md alone. Node 18 or newer, no packages.
//
//   node docs/vectors/reader.mjs            reads index.json and every vector, compares, prints a table
//   node docs/vectors/reader.mjs --json     prints what it found, and compares nothing
//
// It plays the receiver of one Push stream: everything but grants, pages and time.

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { keyed } from "./blake3.mjs";
import {
  CONTRACT, IDENTITY, TICKET, contractDigest, differences, encode, identityDifferences, identityDigest,
  identityRecord, promptDigest, refusals,
} from "./contract.mjs";
import { Malformed, delimited, fields, message, unpackMap } from "./wire.mjs";

const ITEM = { fp32: 4, fp16: 2, bf16: 2, float64: 8 };
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

class Refusal extends Error {
  constructor(reason, differences = []) {
    super(reason);
    Object.assign(this, { reason, differences });
  }
}

function need(holds, reason, differences = []) {
  if (!holds) throw new Refusal(reason, differences);
}

function u32(value) {
  const out = Buffer.alloc(4);
  out.writeUInt32LE(value);
  return out;
}

function u64(value) {
  const out = Buffer.alloc(8);
  out.writeBigUInt64LE(BigInt(value));
  return out;
}

// What a malformed piece raises as, whatever was wrong with it.
function reading(reason, read) {
  try {
    return read();
  } catch (error) {
    throw error instanceof Malformed ? new Refusal(reason) : error;
  }
}

// ---- messages -----------------------------------------------------------------------------------

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

function readMessage(bytes) {
  if (bytes[0] === 0x12) return readFrame(bytes);
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
  check(c.layers.reduce((sum, { planes }) => sum + planes.length, 0) <= 4096);
  check(c.model_digest.length === 32 && [0, 32].includes(c.tokenizer_digest.length));
  check([c.version, c.vocab_size, c.page_size].every((number) => number >= 1));
  check(["rope", "learned", "alibi", "none"].includes(c.positions.kind) && c.positions.scaling_parameters.size <= 256);
  const numbers = [c.positions.theta, c.attention.scale, c.attention.soft_cap, ...c.positions.scaling_parameters.values()];
  check(numbers.every(Number.isFinite));
  check([0, c.layers.length].includes(c.attention.sliding_window.length));
  check(["hnd", "nhd"].includes(c.page_axis_order) && c.kv_dtype in ITEM);
  const names = [c.positions.scaling, c.device, c.weight_dtype, c.activation_dtype];
  check([...names, ...c.positions.scaling_parameters.keys(), ...c.info.keys()].every(named));
  check([...c.info.values()].every((value) => length(value) <= 4096));
  for (const { planes } of c.layers) {
    check(planes.length >= 1 && planes.length <= 16 && new Set(planes.map((p) => p.name)).size === planes.length);
    check(planes.every((p) => named(p.name) && p.heads >= 1 && p.heads <= 65536));
    check(planes.every((p) => p.head_dim >= 1 && p.head_dim <= 2 ** 20));
  }
}

function readHeader(bytes) {
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

// ---- the receiver -------------------------------------------------------------------------------

class Receiver {
  // contract: the receiver's own. ticket, identity, logitsOnly: as they were issued.
  constructor(contract, ticket, identity, logitsOnly, maxPayloadBytes) {
    Object.assign(this, { contract, ticket, identity, logitsOnly, maxPayloadBytes });
    this.start = logitsOnly ? identity.end : identity.start;
    this.seen = { frame_digests: [] };
    this.payloadBytes = 0;
    this.planes = new Map();
    this.take = this.takeOpening;
  }

  takeOpening(open) {
    need(open.kind === "open", "MESSAGE_ORDER");
    const { ticket, contract } = this;
    need(open.incarnation.equals(ticket.incarnation), "INCARNATION");
    need(open.handoff_id.equals(ticket.handoff_id) && open.attempt <= ticket.attempt, "TICKET_UNKNOWN");
    need(open.attempt === ticket.attempt, "ATTEMPT_STALE");
    const proof = keyed(ticket.secret, Buffer.from("pd-proof"), encode(identityRecord(open.identity)));
    need(proof.equals(open.proof), "PROOF");
    need(open.integrity === "blake3-keyed", "INTEGRITY");
    const refused = refusals(open.contract, contract);
    need(refused.length === 0, "CONTRACT_MISMATCH", refused);
    const others = identityDifferences(this.identity, open.identity);
    need(others.length === 0, "IDENTITY_MISMATCH", others);
    need(open.kv_dtype === open.contract.kv_dtype, "KV_DTYPE", ["KV_DTYPE"]);
    need(open.logits_only === this.logitsOnly, "LOGITS_ONLY");
    this.seen.proof = proof.toString("hex");
    const differ = differences(open.contract, contract);
    this.seen.conversions = differ.filter(([, kind]) => kind !== "informational").map(([code]) => code);
    this.dtype = open.kv_dtype;
    contract.layers.forEach(({ planes }, layer) => {
      for (const { name, heads, head_dim } of planes) {
        const data = Buffer.alloc((this.identity.end - this.start) * heads * head_dim * ITEM[this.dtype]);
        this.planes.set(`${layer}/${name}`, { heads, head_dim, data, received: new Array(heads).fill(this.start) });
      }
    });
    this.take = this.takeFrameOrLogits;
  }

  takeFrameOrLogits(next) {
    if (next.kind === "frame") return this.takeFrame(next);
    need(next.kind === "logits", "MESSAGE_ORDER");
    return this.takeLogits(next);
  }

  // The header of a frame that may come next, and its plane.
  checkFrame(raw, payload) {
    const h = readHeader(raw);
    need(h.seq === this.seen.frame_digests.length, "FRAME_SEQUENCE");
    const plane = this.planes.get(`${h.layer}/${h.plane}`);
    need(plane !== undefined, "FRAME_PLANE");
    need(h.dtype === this.dtype, "FRAME_DTYPE");
    const [h0, h1] = h.heads, [t0, t1] = h.tokens;
    need(h1 <= plane.heads, "FRAME_HEADS");
    need(this.start <= t0 && t1 <= this.identity.end, "FRAME_TOKENS");
    const size = (t1 - t0) * (h1 - h0) * plane.head_dim * ITEM[h.dtype];
    need(size === payload.length && size <= this.maxPayloadBytes, "FRAME_SIZE");
    const received = plane.received.slice(h0, h1);
    need(t0 >= Math.max(...received), "FRAME_OVERLAP");
    need(t0 <= Math.min(...received), "FRAME_GAP");
    return [h, plane];
  }

  takeFrame({ header: raw, payload, digest }) {
    const own = keyed(this.ticket.secret, Buffer.from("pd-frame"), u32(raw.length), raw, payload);
    let h, plane;
    try {
      [h, plane] = this.checkFrame(raw, payload);
    } catch (error) {
      // Nonsense that does not verify was damaged; nonsense that does was meant.
      const lost = ["FRAME_SEQUENCE", "FRAME_OVERLAP", "FRAME_GAP"].includes(error.reason);
      throw lost || own.equals(digest) ? error : new Refusal("FRAME_DIGEST");
    }
    need(own.equals(digest), "FRAME_DIGEST");
    const [h0, h1] = h.heads, [t0, t1] = h.tokens, head = plane.head_dim * ITEM[h.dtype];
    plane.received.fill(t1, h0, h1);
    for (let t = t0; t < t1; t++) {
      const from = (t - t0) * (h1 - h0) * head;
      payload.copy(plane.data, ((t - this.start) * plane.heads + h0) * head, from, from + (h1 - h0) * head);
    }
    this.payloadBytes += payload.length;
    this.seen.frame_digests.push(own.toString("hex"));
  }

  takeLogits(logits) {
    const name = Buffer.from(logits.dtype);
    const own = keyed(
      this.ticket.secret, Buffer.from("pd-logit"), u32(name.length), name, u32(logits.position), logits.data,
    );
    need(own.equals(logits.digest), "LOGITS_DIGEST");
    const dtype = this.contract.activation_dtype === "float64" ? "float64" : "fp32";
    need(logits.dtype === dtype, "LOGITS_DTYPE");
    need(logits.data.length === this.contract.vocab_size * ITEM[dtype], "LOGITS_SIZE");
    need(logits.position === this.identity.end - 1, "LOGITS_POSITION");
    this.logits = logits;
    this.seen.logits_digest = own.toString("hex");
    this.take = this.takeCommit;
  }

  takeCommit(commit) {
    need(commit.kind === "commit", "MESSAGE_ORDER");
    const { end } = this.identity;
    const complete = [...this.planes.values()].every(({ received }) => received.every((token) => token === end));
    need(complete, "FRAMES_MISSING");
    const frames = this.seen.frame_digests;
    need(commit.frames === frames.length && commit.payload_bytes === BigInt(this.payloadBytes), "MANIFEST");
    need(commit.start === this.start && commit.end === end, "MANIFEST");
    const own = keyed(
      this.ticket.secret, Buffer.from("pd-manif"), ...frames.map((hex) => Buffer.from(hex, "hex")),
      this.logits.digest, identityDigest(this.identity),
      u32(frames.length), u64(this.payloadBytes), u32(this.start), u32(end),
    );
    need(own.equals(commit.digest), "MANIFEST");
    this.seen.manifest_digest = own.toString("hex");
    this.take = null; // what follows is not read
  }

  // The whole received cache in the sender's dtype: layer by layer, its planes in the contract's order.
  cache() {
    return Buffer.concat([...this.planes.values()].map(({ data }) => data));
  }

  // The id of the largest score; of equals the lowest.
  argmax() {
    const { dtype, data } = this.logits;
    const scores = Array.from({ length: data.length / ITEM[dtype] }, (_, i) =>
      dtype === "fp32" ? data.readFloatLE(4 * i) : data.readDoubleLE(8 * i),
    );
    return scores.indexOf(Math.max(...scores));
  }
}

// What one file holds, without looking at what it should hold.
function readVector(bytes, { prompt_ids, logits_only, max_payload_bytes }) {
  const records = [];
  for (let at = 0, record; at < bytes.length; ) {
    [record, at] = delimited(bytes, at);
    records.push(record);
  }
  const contract = message(records[0], CONTRACT);
  const ticket = message(records[1], TICKET);
  const identity = message(records[2], IDENTITY);
  const receiver = new Receiver(contract, ticket, identity, logits_only, max_payload_bytes);
  const requests = records.slice(3);
  const found = {
    contract_digest: contractDigest(contract).toString("hex"),
    identity_digest: identityDigest(identity).toString("hex"),
    prompt_digest: promptDigest(prompt_ids).toString("hex"),
  };
  let at = 0;
  try {
    for (; at < requests.length && receiver.take !== null; at++)
      receiver.take(reading("MALFORMED_MESSAGE", () => readMessage(requests[at])));
    need(receiver.take === null, "SENDER_GONE");
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    return { ...found, result: "refused", reason: error.reason, at, differences: error.differences };
  }
  const cache = createHash("sha256").update(receiver.cache()).digest("hex");
  return {
    ...found, result: "accepted", ...receiver.seen, payload_bytes: receiver.payloadBytes, cache_sha256: cache,
    first_token: receiver.argmax(),
  };
}

const FOLDER = dirname(fileURLToPath(import.meta.url));
const index = JSON.parse(readFileSync(join(FOLDER, "index.json"), "utf-8"));
const found = Object.fromEntries(
  index.vectors.map((vector) => [vector.name, readVector(readFileSync(join(FOLDER, vector.file)), vector)]),
);
if (process.argv.includes("--json")) {
  console.log(JSON.stringify(found));
} else {
  let wrong = 0;
  for (const { name, expected } of index.vectors) {
    const differing = Object.keys(expected).filter(
      (key) => key !== "status" && JSON.stringify(expected[key]) !== JSON.stringify(found[name][key]),
    );
    wrong += differing.length > 0;
    const said = found[name].reason ?? "accepted";
    console.log(`${differing.length ? "DIFFERS" : "agrees "}  ${name.padEnd(32)} ${said}  ${differing.join(" ")}`);
  }
  console.log(`${index.vectors.length} vectors, ${wrong} differ`);
  process.exit(wrong ? 1 : 0);
}
