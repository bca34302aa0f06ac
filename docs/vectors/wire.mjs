// Protobuf and msgpack by hand: just what the handoff protocol uses.

export class Malformed extends Error {}

// ---- protobuf ---------------------------------------------------------------------------------

const UTF8 = new TextDecoder("utf-8", { fatal: true });
const text = (bytes) => {
  try {
    return UTF8.decode(bytes);
  } catch {
    throw new Malformed("not UTF-8");
  }
};

function varint(bytes, at, most = 10) {
  let value = 0n;
  for (let i = 0; i < most; i++) {
    if (at + i >= bytes.length) break;
    value |= BigInt(bytes[at + i] & 0x7f) << BigInt(7 * i);
    if (bytes[at + i] < 0x80) return [value, at + i + 1];
  }
  throw new Malformed("no varint");
}

// Length-delimited bytes at `at`, and where they end.
export function delimited(bytes, at, most = 10) {
  const [size, start] = varint(bytes, at, most);
  const end = start + Number(size);
  if (end > bytes.length) throw new Malformed(`a field of ${size} bytes does not fit`);
  return [bytes.subarray(start, end), end];
}

// [field number, wire type, value] of every field, in the order of the bytes.
export function* fields(bytes) {
  for (let at = 0; at < bytes.length; ) {
    let tag, value;
    [tag, at] = varint(bytes, at);
    const number = Number(tag >> 3n), type = Number(tag & 7n);
    if (number === 0) throw new Malformed("field number 0");
    if (type === 0) [value, at] = varint(bytes, at);
    else if (type === 2) [value, at] = delimited(bytes, at);
    else if (type === 1 || type === 5) {
      const size = type === 1 ? 8 : 4;
      if (at + size > bytes.length) throw new Malformed("a number is cut");
      [value, at] = [bytes.subarray(at, at + size), at + size];
    } else throw new Malformed(`wire type ${type}`);
    yield [number, type, value];
  }
}

const WIRE_TYPE = { u32: 0, u64: 0, bool: 0, double: 1, string: 2, bytes: 2 };
const EMPTY = { u32: 0, u64: 0n, bool: false, double: 0, string: "" };

function scalar(kind, value) {
  if (kind === "u32") return Number(BigInt.asUintN(32, value));
  if (kind === "u64") return BigInt.asUintN(64, value);
  if (kind === "bool") return value !== 0n;
  if (kind === "double") return Buffer.from(value).readDoubleLE(0);
  return kind === "string" ? text(value) : Buffer.from(value);
}

// A message as an object. A schema maps a field number to [name, kind] with kind one of
//   u32 u64 bool double string bytes | {message} | {list: {message}} | {list: "u32"} | {map: kind} | "optional bytes"
// Absent scalars are empty, absent messages and optional fields null. Unknown fields are skipped.
export function message(bytes, schema) {
  const out = {};
  for (const [name, kind] of Object.values(schema)) {
    if (kind.list) out[name] = [];
    else if (kind.map) out[name] = new Map();
    else out[name] = kind === "bytes" ? Buffer.alloc(0) : EMPTY[kind] ?? null;
  }
  for (const [number, type, value] of fields(bytes)) {
    const [name, kind] = schema[number] ?? [];
    if (name === undefined) continue;
    if (kind.map) {
      if (type !== 2) continue;
      const entry = message(value, { 1: ["key", "string"], 2: ["value", kind.map] });
      out[name].set(entry.key, entry.value);
    } else if (kind.list === "u32") {
      if (type === 0) out[name].push(scalar("u32", value));
      else if (type === 2)
        for (let at = 0, item; at < value.length; ) {
          [item, at] = varint(value, at);
          out[name].push(scalar("u32", item));
        }
    } else if (kind.list) {
      if (type === 2) out[name].push(message(value, kind.list.message));
    } else if (kind.message) {
      if (type === 2) out[name] = message(value, kind.message);
    } else {
      const plain = kind.replace("optional ", "");
      if (type === WIRE_TYPE[plain]) out[name] = scalar(plain, value);
    }
  }
  return out;
}

// ---- msgpack ----------------------------------------------------------------------------------

const CUT = () => new Malformed("msgpack is cut");

// One msgpack value. Maps become {pairs}, integers are BigInt; what headers never hold is refused.
function unpack(bytes, at) {
  if (at >= bytes.length) throw CUT();
  const first = bytes[at++];
  const number = (size, signed) => {
    if (at + size > bytes.length) throw CUT();
    const view = Buffer.from(bytes.subarray(at, at + size));
    const raw = BigInt("0x" + view.toString("hex"));
    return [signed ? BigInt.asIntN(8 * size, raw) : raw, at + size];
  };
  const string = (size) => {
    if (at + size > bytes.length) throw CUT();
    return [text(bytes.subarray(at, at + size)), at + size];
  };
  const items = (count, most) => {
    if (count > most) throw new Malformed("too many items");
    const list = [];
    for (let i = 0, item; i < count; i++) {
      [item, at] = unpack(bytes, at);
      list.push(item);
    }
    return [list, at];
  };
  const map = (count) => {
    if (count > 6) throw new Malformed("too many keys");
    const [flat, end] = items(2 * count, 12);
    return [{ pairs: Array.from({ length: count }, (_, i) => [flat[2 * i], flat[2 * i + 1]]) }, end];
  };
  const sized = (size, then) => {
    const [value, end] = number(size, false);
    at = end;
    return then(Number(value));
  };
  if (first < 0x80) return [BigInt(first), at];
  if (first < 0x90) return map(first & 15);
  if (first < 0xa0) return items(first & 15, 2);
  if (first < 0xc0) return string(first & 31);
  if (first >= 0xe0) return [BigInt(first - 256), at];
  switch (first) {
    case 0xc0: return [null, at];
    case 0xc2: return [false, at];
    case 0xc3: return [true, at];
    case 0xca: return [0.5, number(4)[1]]; // any float: no key may have one
    case 0xcb: return [0.5, number(8)[1]];
    case 0xcc: return number(1, false);
    case 0xcd: return number(2, false);
    case 0xce: return number(4, false);
    case 0xcf: return number(8, false);
    case 0xd0: return number(1, true);
    case 0xd1: return number(2, true);
    case 0xd2: return number(4, true);
    case 0xd3: return number(8, true);
    case 0xd9: return sized(1, string);
    case 0xda: return sized(2, string);
    case 0xdb: return sized(4, string);
    case 0xdc: return sized(2, (count) => items(count, 2));
    case 0xdd: return sized(4, (count) => items(count, 2));
    case 0xde: return sized(2, map);
    case 0xdf: return sized(4, map);
    default: throw new Malformed(`msgpack type ${first}`);
  }
}

// The [key, value] pairs of bytes that are exactly one map.
export function unpackMap(bytes) {
  const [value, end] = unpack(bytes, 0);
  if (end !== bytes.length) throw new Malformed("bytes after the map");
  if (value === null || value.pairs === undefined) throw new Malformed("not a map");
  return value.pairs;
}
