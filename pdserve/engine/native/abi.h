// What Python hands over: plain structs, mirrored field by field in library.py. Nothing here owns memory.
#pragma once

#include <cstdint>

extern "C" {

struct Norm {
    const float* scale;  // [width], or null
    const float* shift;  // [width], or null
    float eps;
    int32_t kind;  // 0 none, 1 root mean square, 2 layer norm
};

// [outputs, inputs] in panels (products.h): outputs in groups, each of as many panels of `lanes` as it takes.
struct Matrix {
    const void* weight;
    const float* scale;  // [outputs] of int8 weights
    const float* bias;   // [outputs], or null
    int32_t outputs, inputs;
    int32_t group, lanes;
};

struct Layer {
    Norm attn_norm, q_norm, k_norm, mlp_norm;
    Matrix qkv, o, gate, up, down;  // qkv: a group is a head; gate: of gated MLPs, laid out as up
    void *k_pages, *v_pages;
    int64_t window;  // tokens a query sees, itself included; 0: all
};

struct Model {
    int32_t width, heads, kv_heads, head_dim, ffn, rotary_dims;
    int32_t post_norm, gated;
    int32_t activation;                // 0 silu, 1 gelu, 2 gelu_tanh, 3 relu
    int32_t x_bf16, w_int8, kv_bf16;   // types: activations and weights; int8 weights instead; the cache
    int32_t page_size;
    float scale, soft_cap;
    int64_t head_stride, slot_stride;  // of the pages, in elements
    const void *cos, *sin;             // [positions, rotary_dims], in the activations' type
};

struct Step {
    int32_t rows, sequences, threads;
    int32_t stored;            // set by attention_inputs: rows of k and v written to pages
    const int64_t* slots;      // [rows]
    const int64_t* positions;  // [rows] of the rotary table
    const int64_t* places;     // [rows] in their own sequences
    const int32_t* first_row;  // [sequences + 1]
    const int32_t* tables;     // block tables, one after the other
    const int32_t* table_at;   // [sequences] where each begins
    char* scratch;             // pdserve_scratch_bytes(...), 64-byte aligned
};
}
