// One decoder layer in three calls, all layers in one, and the logits: what pdserve/engine/model.py says in torch.
//
//     attention_inputs    norm, q k v, q/k norm, rotation, k and v into the cache pages
//     attention           over the pages (attention.h)
//     attention_output    output projection, residual, norm, MLP, residual
//
// A product's result never goes to memory as a whole: a task computes a tile and at once does what follows (rotation,
// activation, residual). Every sum is in fp32; what lies between two calls is in the activations' type.
// Built by build.py, called through library.py. Compiled once for every batch size and length.

#include <type_traits>

#include "attention.h"

template <class X>
static X* shared(const Step& s, long offset) { return (X*)(s.scratch + offset); }

// ---- norms -----------------------------------------------------------------------------------------

// out = norm(x), both [width]; out may be x.
template <class X, class Y>
static void norm_row(const Norm& norm, const X* x, int width, Y* out) {
    f32x16 total = {};
    float mean = 0;
    if (norm.kind == 2) {
        by_lanes(width, [&](int i, int n) { total += load(x + i, n); });
        mean = sum(total) / width;
        total = f32x16{};
    }
    by_lanes(width, [&](int i, int n) {
        f32x16 v = load(x + i, n) - mean;
        if (n < LANES) for (int lane = n; lane < LANES; lane++) v[lane] = 0;
        total += v * v;
    });
    float factor = norm.kind == 0 ? 1.0f : 1.0f / std::sqrt(sum(total) / width + norm.eps);
    by_lanes(width, [&](int i, int n) {
        f32x16 v = (load(x + i, n) - mean) * factor;
        if (norm.scale) v *= load(norm.scale + i, n);
        if (norm.shift) v += load(norm.shift + i, n);
        store(out + i, v, n);
    });
}

template <class X, class Y>
static void norm_rows(const Step& s, const Norm& norm, const X* x, int rows, int width, Y* out) {
    constexpr int EACH = 16;
    share(s.threads, (rows + EACH - 1) / EACH, [&](Turn t) {
        for (int row = t.task * EACH; row < std::min(rows, (t.task + 1) * EACH); row++)
            norm_row(norm, x + long(row) * width, width, out + long(row) * width);
    });
}

// ---- products --------------------------------------------------------------------------------------

// A finished tile: rows [first_row, first_row + rows) by outputs [first, first + outputs); row r begins at at + r * ld.
// Of a gated product the outputs of `up` lie `gap` floats after the gate's.
struct Tile {
    float* at;
    long ld, gap;
    int first_row, rows, first, outputs;
};

// Scale and bias of a finished product [rows, outputs], whose outputs begin at `first` of the matrix.
INLINE void scale_and_bias(const Matrix& w, int rows, int first, int outputs, float* out, long ld) {
    if (w.scale == nullptr && w.bias == nullptr) return;
    for (int row = 0; row < rows; row++)
        by_lanes(outputs, [&](int i, int n) {
            f32x16 v = load(out + row * ld + i, n);
            if (w.scale) v *= load(w.scale + first + i, n);
            if (w.bias) v += load(w.bias + first + i, n);
            store(out + row * ld + i, v, n);
        });
}

// finish(tile) for every tile of x [rows, inputs] w^T. A task is a group of outputs for some of the rows; with a gate,
// whose product comes first in a tile, the same outputs of both.
template <class X, class W, class Finish>
static void product(const Model& m, const Step& s, const Matrix* gate, const Matrix& up, const X* x, int rows, Finish finish) {
    const Panels<X, W> weights(up), gates(gate ? *gate : up);
    const int groups = (up.outputs + up.group - 1) / up.group, inputs = up.inputs, columns = weights.columns();
    int splits = (rows + TASK_ROWS - 1) / TASK_ROWS;
    auto uneven = [&](int tasks) { return 20 * ((tasks + s.threads - 1) / s.threads * s.threads - tasks) > tasks; };
    while (uneven(groups * splits) && rows / splits >= PANEL) splits *= 2;
    const int each = int(rounded((rows + splits - 1) / splits, has_tiles() ? TILE_ROWS : most_rows(4)));
    splits = (rows + each - 1) / each;
    const long per_thread = Scratch(m, s.threads, 0).per_thread, ld = gate ? 2 * columns : columns;
    share(s.threads, groups * splits, [&](Turn turn) {
        Cutter cut{s.scratch + turn.thread * per_thread};
        float *tile = cut.take<float>(TASK_ROWS * tile_columns(m)), *wide = cut.take<float>(wide_floats<X>(inputs));
        const int number = turn.task / splits, follows = turn.next / splits, first_row = turn.task % splits * each;
        const int first = number * up.group, outputs = std::min(up.group, up.outputs - first), some = std::min(each, rows - first_row);
        const bool new_group = turn.next >= 0 && follows != number;
        auto panels = [&](const Matrix& w, const Panels<X, W>& of, float* to, Ahead after) {
            for (int i = 0; i < of.each; i++) {
                const long panel = long(number) * of.each + i;
                const Ahead next = i + 1 < of.each ? of.ahead(panel + 1) : after;
                panel_product<X, W>(of, panel, x + long(first_row) * inputs, some, to + i * of.lanes, ld,
                                    fetches(s.threads, some, of.lanes) ? next : Ahead{}, wide);
            }
            scale_and_bias(w, some, first, outputs, to, ld);
        };
        if (gate) panels(*gate, gates, tile, weights.ahead(long(number) * weights.each));
        panels(up, weights, gate ? tile + columns : tile, new_group ? gates.ahead(long(follows) * gates.each) : Ahead{});
        finish(Tile{tile, ld, columns, first_row, some, first, outputs});
    });
}

// ---- the parts of a layer --------------------------------------------------------------------------

// Rotates the first `dims` of a head, pairs (i, i + dims / 2), by a row of the tables.
template <class X>
static void rotate(float* head, const X* cos, const X* sin, int dims) {
    const int half = dims / 2;
    by_lanes(half, [&](int i, int n) {
        f32x16 a = load(head + i, n), b = load(head + half + i, n);
        store(head + i, a * load(cos + i, n) + b * load(sin + i, n), n);
        store(head + half + i, b * load(cos + half + i, n) + a * load(sin + half + i, n), n);
    });
}

template <class X, class KV>
static void keep_row(const float* head, int d, X* out, KV* page) {
    by_lanes(d, [&](int i, int n) {
        store(out + i, load(head + i, n), n);
        store(page + i, load(out + i, n), n);  // the page holds the activations' precision, or less
    });
}

// x [rows, width] -> q [rows, heads, d], k and v [rows, kv_heads, d], k and v into their slots.
template <class X, class W, class KV>
static void attention_inputs(const Model& m, const Layer& l, Step& s, const X* x, X* q, X* k, X* v) {
    const int d = m.head_dim, rows = s.rows, rotated = m.heads + m.kv_heads;
    const X* hidden = x;
    if (!m.post_norm) {
        X* normed = shared<X>(s, Scratch(m, s.threads, rows).hidden);
        norm_rows(s, l.attn_norm, x, rows, m.width, normed);
        hidden = normed;
    }
    std::atomic<long> kept{0};
    const X *cos = (const X*)m.cos, *sin = (const X*)m.sin;
    product<X, W>(m, s, nullptr, l.qkv, hidden, rows, [&](const Tile& t) {  // of one head
        const long head = t.first / d;
        const bool is_query = head < m.heads, is_key = !is_query && head < rotated;
        const Norm norm = is_query ? l.q_norm : is_key ? l.k_norm : Norm{};
        for (int r = 0; r < t.rows; r++) {
            const long row = t.first_row + r;
            float* values = t.at + r * t.ld;
            if (norm.kind) norm_row(norm, values, d, values);
            if (head < rotated && m.rotary_dims) {
                long at = s.positions[row] * m.rotary_dims;
                rotate(values, cos + at, sin + at, m.rotary_dims);
            }
            if (is_query) {
                by_lanes(d, [&](int i, int n) { store(q + (row * m.heads + head) * d + i, load(values + i, n), n); });
                continue;
            }
            long kv_head = head - (is_key ? m.heads : rotated);
            KV* page = (KV*)(is_key ? l.k_pages : l.v_pages) + kv_head * m.head_stride + s.slots[row] * m.slot_stride;
            keep_row(values, d, (is_key ? k : v) + (row * m.kv_heads + kv_head) * d, page);
        }
        if (!is_query) kept += t.rows;
    });
    s.stored = int32_t(kept / (2 * m.kv_heads));
}

// EXACT: a result that becomes a bf16 needs neither an exact exponential nor an exact division.
template <bool EXACT>
static f32x16 activated(int kind, f32x16 x) {
    switch (kind) {
        case 0: return EXACT ? x / (1.0f + exp(-x)) : x * near_reciprocal(1.0f + exp2<false>(x * -LOG2_E));
        case 1: return 0.5f * x * (1.0f + erf(x * 0.70710678f));
        case 2: return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x)));
        default: return max(x, f32x16{});
    }
}

// x [rows, width], o [rows, heads * d] -> out [rows, width].
template <class X, class W>
static void attention_output(const Model& m, const Layer& l, const Step& s, const X* x, const X* o, X* out) {
    const int width = m.width, rows = s.rows;
    const Scratch room(m, s.threads, rows);
    X *hidden = shared<X>(s, room.hidden), *active = shared<X>(s, room.activated);
    float* y = shared<float>(s, room.residual);
    product<X, W>(m, s, nullptr, l.o, o, rows, [&](const Tile& t) {
        for (int r = 0; r < t.rows; r++)
            by_lanes(t.outputs, [&](int i, int n) {
                long at = long(t.first_row + r) * width + t.first + i;
                store(y + at, load(t.at + r * t.ld + i, n) + load(x + at, n), n);
            });
    });
    if (m.post_norm) norm_rows(s, l.attn_norm, y, rows, width, y);
    norm_rows(s, m.post_norm ? Norm{} : l.mlp_norm, y, rows, width, hidden);
    product<X, W>(m, s, m.gated ? &l.gate : nullptr, l.up, hidden, rows, [&](const Tile& t) {
        for (int r = 0; r < t.rows; r++)
            by_lanes(t.outputs, [&](int i, int n) {
                const float* at = t.at + r * t.ld + i;
                f32x16 h = activated<(sizeof(X) > 2)>(m.activation, load(at, n));
                if (m.gated) h *= load(at + t.gap, n);
                store(active + long(t.first_row + r) * m.ffn + t.first + i, h, n);
            });
    });
    product<X, W>(m, s, nullptr, l.down, active, rows, [&](const Tile& t) {
        for (int r = 0; r < t.rows; r++)
            by_lanes(t.outputs, [&](int i, int n) {
                long at = long(t.first_row + r) * width + t.first + i;
                f32x16 sum = load(t.at + r * t.ld + i, n) + load(y + at, n);
                if (m.post_norm) store(y + at, sum, n);
                else store(out + at, sum, n);
            });
    });
    if (m.post_norm) norm_rows(s, l.mlp_norm, y, rows, width, out);
}

// x [rows, inputs] -> out [rows, outputs] in fp32, normed before if the norm is one.
template <class X, class W>
static void logits(const Model& m, const Step& s, const Norm& norm, const Matrix& head, const X* x, float* out) {
    X* hidden = shared<X>(s, Scratch(m, s.threads, s.rows).hidden);
    if (norm.kind) norm_rows(s, norm, x, s.rows, head.inputs, hidden);
    product<X, W>(m, s, nullptr, head, norm.kind ? hidden : x, s.rows, [&](const Tile& t) {
        for (int r = 0; r < t.rows; r++)
            std::memcpy(out + long(t.first_row + r) * head.outputs + t.first, t.at + r * t.ld, t.outputs * sizeof(float));
    });
}

// One product by itself: out [rows, outputs] = x [rows, inputs] w^T, in x's type.
template <class X, class W>
static void linear(const Model& m, const Step& s, const Matrix& w, const X* x, X* out) {
    product<X, W>(m, s, nullptr, w, x, s.rows, [&](const Tile& t) {
        for (int r = 0; r < t.rows; r++)
            by_lanes(t.outputs, [&](int i, int n) {
                store(out + long(t.first_row + r) * w.outputs + t.first + i, load(t.at + r * t.ld + i, n), n);
            });
    });
}

// ---- what Python calls -----------------------------------------------------------------------------

// f(x, w, kv) with a null pointer of each type that this model and cache have.
template <class F>
static void with_types(const Model& m, F f) {
    auto with_kv = [&](auto* x, auto* w) {
        if (m.kv_bf16) f(x, w, (bf16*)nullptr);
        else f(x, w, (float*)nullptr);
    };
    auto with_w = [&](auto* x) {
        if (m.w_int8) with_kv(x, (int8_t*)nullptr);
        else with_kv(x, x);
    };
    if (m.x_bf16) with_w((bf16*)nullptr);
    else with_w((float*)nullptr);
}

#define TYPE(pointer) std::remove_pointer_t<decltype(pointer)>

extern "C" {

int32_t pdserve_abi() { return 3; }

// The instructions it computes with: 3 tiles of bf16, 2 bf16 products, 1 AVX-512, 0 portable.
int32_t pdserve_level() {
    if (has_tiles()) return 3;
#if defined(PDSERVE_BF16_DOT)
    return 2;
#elif defined(PDSERVE_AVX512)
    return 1;
#else
    return 0;
#endif
}

int64_t pdserve_scratch_bytes(const Model* m, int64_t rows, int64_t ones, int64_t longest, int32_t threads) {
    return Scratch(*m, threads, rows, ones, longest).bytes;
}

void pdserve_attention_inputs(const Model* m, const Layer* l, Step* s, const void* x, void* q, void* k, void* v) {
    with_types(*m, [&](auto* xt, auto* wt, auto* kt) {
        using X = TYPE(xt);
        attention_inputs<X, TYPE(wt), TYPE(kt)>(*m, *l, *s, (const X*)x, (X*)q, (X*)k, (X*)v);
    });
}

void pdserve_attention(const Model* m, const Layer* l, const Step* s, const void* q, void* out) {
    with_types(*m, [&](auto* xt, auto*, auto* kt) {
        using X = TYPE(xt);
        attend<X, TYPE(kt)>(*m, *l, *s, (const X*)q, (X*)out);
    });
}

void pdserve_attention_output(const Model* m, const Layer* l, const Step* s, const void* x, const void* o, void* out) {
    with_types(*m, [&](auto* xt, auto* wt, auto*) {
        using X = TYPE(xt);
        attention_output<X, TYPE(wt)>(*m, *l, *s, (const X*)x, (const X*)o, (X*)out);
    });
}

// All layers, from x to x; stored [count]: rows that each put into its pages.
void pdserve_layers(const Model* m, const Layer* layers, int32_t count, Step* s, void* x, void* q, void* k, void* v, void* o, int32_t* stored) {
    with_types(*m, [&](auto* xt, auto* wt, auto* kt) {
        using X = TYPE(xt);
        using W = TYPE(wt);
        using KV = TYPE(kt);
        for (int i = 0; i < count; i++) {
            attention_inputs<X, W, KV>(*m, layers[i], *s, (const X*)x, (X*)q, (X*)k, (X*)v);
            stored[i] = s->stored;
            attend<X, KV>(*m, layers[i], *s, (const X*)q, (X*)o);
            attention_output<X, W>(*m, layers[i], *s, (const X*)x, (const X*)o, (X*)x);
        }
    });
}

void pdserve_linear(const Model* m, const Step* s, const Matrix* w, const void* x, void* out) {
    with_types(*m, [&](auto* xt, auto* wt, auto*) {
        using X = TYPE(xt);
        linear<X, TYPE(wt)>(*m, *s, *w, (const X*)x, (X*)out);
    });
}

void pdserve_logits(const Model* m, const Step* s, const Norm* norm, const Matrix* head, const void* x, float* out) {
    with_types(*m, [&](auto* xt, auto* wt, auto*) {
        using X = TYPE(xt);
        logits<X, TYPE(wt)>(*m, *s, *norm, *head, (const X*)x, out);
    });
}
}
