// BLAKE3 in keyed mode, 32 bytes out, from the public specification (sections 2.1 to 2.6).

const IV = [0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19];
const PERMUTATION = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];
const COLUMNS_AND_DIAGONALS = [
  [0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
  [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14],
];
const CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8, KEYED = 16;
const BLOCK = 64, CHUNK = 1024;

const rotate = (x, bits) => (x >>> bits) | (x << (32 - bits));

function words(bytes, count) {
  const out = new Array(count).fill(0);
  for (let i = 0; i < bytes.length; i++) out[i >> 2] |= bytes[i] << (8 * (i & 3));
  return out;
}

function mix(v, [a, b, c, d], x, y) {
  v[a] = (v[a] + v[b] + x) | 0;
  v[d] = rotate(v[d] ^ v[a], 16);
  v[c] = (v[c] + v[d]) | 0;
  v[b] = rotate(v[b] ^ v[c], 12);
  v[a] = (v[a] + v[b] + y) | 0;
  v[d] = rotate(v[d] ^ v[a], 8);
  v[c] = (v[c] + v[d]) | 0;
  v[b] = rotate(v[b] ^ v[c], 7);
}

// The first eight words of the compression function's output: the new chaining value.
function compress(chaining, block, counter, length, flags) {
  const v = [...chaining, ...IV.slice(0, 4), counter | 0, Math.floor(counter / 2 ** 32), length, flags];
  let m = block;
  for (let round = 0; round < 7; round++) {
    COLUMNS_AND_DIAGONALS.forEach((places, i) => mix(v, places, m[2 * i], m[2 * i + 1]));
    m = PERMUTATION.map((from) => m[from]);
  }
  return v.slice(0, 8).map((word, i) => word ^ v[i + 8]);
}

function chunk(key, data, counter, last) {
  let chaining = key;
  const blocks = Math.max(1, Math.ceil(data.length / BLOCK));
  for (let i = 0; i < blocks; i++) {
    const block = data.subarray(i * BLOCK, (i + 1) * BLOCK);
    const end = i === blocks - 1 ? CHUNK_END | last : 0;
    chaining = compress(chaining, words(block, 16), counter, block.length, KEYED | (i === 0 ? CHUNK_START : 0) | end);
  }
  return chaining;
}

// The left child is the largest power of two of whole chunks that leaves something for the right.
function tree(key, data, counter, last) {
  if (data.length <= CHUNK) return chunk(key, data, counter, last);
  let left = 1;
  while (2 * left * CHUNK < data.length) left *= 2;
  const children = [
    ...tree(key, data.subarray(0, left * CHUNK), counter, 0),
    ...tree(key, data.subarray(left * CHUNK), counter + left, 0),
  ];
  return compress(key, children, 0, BLOCK, KEYED | PARENT | last);
}

export function keyed(key, ...parts) {
  const chaining = tree(words(key, 8), Buffer.concat(parts), 0, ROOT);
  const out = Buffer.alloc(32);
  chaining.forEach((word, i) => out.writeInt32LE(word | 0, 4 * i));
  return out;
}
