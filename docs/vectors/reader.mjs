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
import { ITEM, Refusal, need, readHeader, readMessage, reading } from "./messages.mjs";
import { delimited, message } from "./wire.mjs";

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
    if (next.kind === "frames") return next.frames.forEach((frame) => this.takeFrame(frame));
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
