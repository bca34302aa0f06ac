// Contracts and identities: their protobuf fields, canonical encoding, digests and differences.

import { createHash } from "node:crypto";

// ---- protobuf schemas (proto/pdserve/v1/common.proto) -------------------------------------------

const POSITIONS = {
  1: ["kind", "string"], 2: ["theta", "double"], 3: ["dims", "u32"], 4: ["scaling", "string"],
  5: ["scaling_parameters", { map: "double" }], 6: ["original_max_positions", "u32"],
  7: ["interleaved", "bool"], 8: ["keys_cached_rotated", "bool"],
};
const ATTENTION = { 1: ["scale", "double"], 2: ["soft_cap", "double"], 3: ["sliding_window", { list: "u32" }] };
const PLANE = { 1: ["name", "string"], 2: ["heads", "u32"], 3: ["head_dim", "u32"] };
const LAYER = { 1: ["planes", { list: { message: PLANE } }] };

export const CONTRACT = {
  1: ["version", "u32"], 2: ["model_digest", "bytes"], 3: ["positions", { message: POSITIONS }],
  4: ["attention", { message: ATTENTION }], 5: ["layers", { list: { message: LAYER } }], 6: ["vocab_size", "u32"],
  7: ["tokenizer_digest", "bytes"], 8: ["page_size", "u32"], 9: ["page_axis_order", "string"],
  10: ["device", "string"], 11: ["kv_dtype", "string"], 12: ["weight_dtype", "string"],
  13: ["activation_dtype", "string"], 14: ["info", { map: "string" }], 15: ["context_limit", "u32"],
  16: ["allow_lossy", "bool"], 17: ["layer_positions", { list: { message: POSITIONS } }],
};
export const IDENTITY = {
  1: ["contract_digest", "bytes"], 2: ["adapter_digest", "optional bytes"], 3: ["tenant", "string"],
  4: ["prompt_digest", "bytes"], 5: ["start", "u32"], 6: ["end", "u32"],
};
export const TICKET = {
  1: ["handoff_id", "bytes"], 2: ["attempt", "u32"], 3: ["incarnation", "bytes"], 4: ["secret", "bytes"],
  5: ["ttl_ms", "u32"], 6: ["held_tokens", "u32"],
};

// ---- the canonical encoding ---------------------------------------------------------------------

function tagged(tag, body) {
  const head = Buffer.alloc(9, tag);
  head.writeBigUInt64LE(BigInt(body.length), 1);
  return Buffer.concat([head, body]);
}

// BigInt is an integer, number a float. Records are {record: name, pairs: [[field, value], ...]}.
export function encode(value) {
  if (value === null) return tagged("N", Buffer.alloc(0));
  if (typeof value === "boolean") return tagged("B", Buffer.from([value ? 1 : 0]));
  if (typeof value === "bigint") return tagged("I", Buffer.from(value.toString()));
  if (typeof value === "number") {
    const body = Buffer.alloc(8);
    body.writeDoubleLE(value);
    return tagged("F", body);
  }
  if (typeof value === "string") return tagged("S", Buffer.from(value, "utf-8"));
  if (Buffer.isBuffer(value)) return tagged("Y", value);
  if (Array.isArray(value)) return tagged("T", Buffer.concat(value.map(encode)));
  return tagged("D", Buffer.concat([encode(value.record), encode(value.pairs)]));
}

const sha256 = (domain, value) => createHash("sha256").update(encode([domain, value])).digest();

export function promptDigest(ids) {
  const body = Buffer.alloc(4 * ids.length);
  ids.forEach((id, i) => body.writeInt32LE(id, 4 * i));
  return sha256("prompt", body);
}

const IDENTITY_FIELDS = ["contract_digest", "adapter_digest", "tenant", "prompt_digest", "start", "end"];
const whole = (value) => (typeof value === "number" ? BigInt(value) : value);

export function identityRecord(identity) {
  return { record: "HandoffIdentity", pairs: IDENTITY_FIELDS.map((name) => [name, whole(identity[name])]) };
}

export const identityDigest = (identity) => sha256("identity", identityRecord(identity));

const byName = (a, b) => Buffer.compare(Buffer.from(a[0]), Buffer.from(b[0]));

function schemeValues(s) {
  const parameters = [...s.scaling_parameters].sort(byName);
  return [
    s.kind, s.theta, BigInt(s.dims), s.scaling, parameters, BigInt(s.original_max_positions), s.interleaved,
    s.keys_cached_rotated,
  ];
}

// [code, value, class] of every field that is compared.
function rows(c) {
  const p = c.positions, a = c.attention;
  const out = [
    ["CONTRACT_VERSION", BigInt(c.version), "must_equal"],
    ["MODEL_DIGEST", c.model_digest, "must_equal"],
    ["POSITION_SCHEME.kind", p.kind, "must_equal"],
    ["POSITION_SCHEME.theta", p.theta, "must_equal"],
    ["POSITION_SCHEME.dims", BigInt(p.dims), "must_equal"],
    ["POSITION_SCHEME.scaling", p.scaling, "must_equal"],
    ["POSITION_SCHEME.scaling_parameters", [...p.scaling_parameters].sort(byName), "must_equal"],
    ["POSITION_SCHEME.original_max_positions", BigInt(p.original_max_positions), "must_equal"],
    ["POSITION_SCHEME.interleaved", p.interleaved, "must_equal"],
    ["POSITION_SCHEME.keys_cached_rotated", p.keys_cached_rotated, "must_equal"],
    ...c.layer_positions.map((s, i) => [`LAYER_POSITIONS[${i}]`, schemeValues(s), "must_equal"]),
    ["ATTENTION.scale", a.scale, "must_equal"],
    ["ATTENTION.soft_cap", a.soft_cap, "must_equal"],
    ["ATTENTION.sliding_window", a.sliding_window.map(BigInt), "must_equal"],
    ["LAYERS", BigInt(c.layers.length), "must_equal"],
  ];
  c.layers.forEach(({ planes }, layer) => {
    out.push([`PLANES[${layer}]`, planes.map((plane) => plane.name), "must_equal"]);
    for (const plane of planes) {
      out.push([`PLANES[${layer}].${plane.name}.heads`, BigInt(plane.heads), "must_equal"]);
      out.push([`PLANES[${layer}].${plane.name}.head_dim`, BigInt(plane.head_dim), "must_equal"]);
    }
  });
  out.push(
    ["VOCAB_SIZE", BigInt(c.vocab_size), "must_equal"],
    ["TOKENIZER_DIGEST", c.tokenizer_digest, "must_equal"],
    ["PAGE_SIZE", BigInt(c.page_size), "convertible"],
    ["PAGE_AXIS_ORDER", c.page_axis_order, "convertible"],
    ["DEVICE", c.device, "convertible"],
    ["KV_DTYPE", c.kv_dtype, "lossy"],
    ["WEIGHT_DTYPE", c.weight_dtype, "lossy"],
    ["ACTIVATION_DTYPE", c.activation_dtype, "lossy"],
    ["ALLOW_LOSSY", c.allow_lossy, "informational"],
    ["CONTEXT_LIMIT", BigInt(c.context_limit), "informational"],
  );
  for (const [name, value] of [...c.info].sort(byName)) out.push([`INFO.${name}`, value, "informational"]);
  return out;
}

export function contractDigest(contract) {
  return sha256("contract", rows(contract).filter(([, , kind]) => kind === "must_equal").map(([code, value]) => [code, value]));
}

const CLASSES = ["must_equal", "lossy", "convertible", "informational"];

// [code, class] of every difference, must-equal ones first.
export function differences(left, right) {
  const a = new Map(rows(left).map((row) => [row[0], row])), b = new Map(rows(right).map((row) => [row[0], row]));
  const found = [];
  for (const code of new Set([...a.keys(), ...b.keys()])) {
    const [, x, kind] = a.get(code) ?? [code, null, undefined], [, y, other] = b.get(code) ?? [code, null, undefined];
    if (!encode(x).equals(encode(y))) found.push([code, kind ?? other]);
  }
  return found.sort((x, y) => CLASSES.indexOf(x[1]) - CLASSES.indexOf(y[1]));
}

const CASTS = ["fp32 bf16", "fp16 bf16", "fp16 fp32", "bf16 fp32"];

// Codes of the differences that forbid a handoff from `left` to `right`.
export function refusals(left, right) {
  const withLoss = left.allow_lossy && right.allow_lossy;
  const fits = {
    KV_DTYPE: CASTS.includes(`${left.kv_dtype} ${right.kv_dtype}`),
    WEIGHT_DTYPE: ![left.weight_dtype, right.weight_dtype].includes("float64"),
    ACTIVATION_DTYPE: ![left.activation_dtype, right.activation_dtype].includes("float64"),
  };
  return differences(left, right)
    .filter(([code, kind]) => kind === "must_equal" || (kind === "lossy" && !(withLoss && fits[code])))
    .map(([code]) => code);
}

export function identityDifferences(expected, got) {
  return IDENTITY_FIELDS.filter((name) => !encode(whole(expected[name])).equals(encode(whole(got[name])))).map(
    (name) => `IDENTITY.${name}`,
  );
}
