// The CPU's inner loops: attention over clusters in blocks, and rounds of soft matching, one head per thread at a time.
//
// Plain C++ for whatever vectors the machine has: the compiler splits 16 floats over its registers. Sums are float32.
// Parallel sections belong to the OpenMP runtime that PyTorch has loaded, and use as many threads.
//
// No exception leaves a parallel section or a function that others call: either would end the process. What was thrown
// is noted (Fault), the section comes to its end, and the caller is told by a number.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <vector>

namespace {

// What a call says. The same numbers are in centroidkv/native/__init__.py.
enum Outcome { DONE = 0, UNSAFE = 1, NO_MEMORY = 2, IMPOSSIBLE = 3 };

// The first exception of a parallel section, as an Outcome.
class Fault {
    std::atomic<int> outcome{DONE};

  public:
    bool none() const { return outcome.load(std::memory_order_relaxed) == DONE; }

    int told() const { return outcome.load(); }

    template <class Work>
    void guard(const Work& work) noexcept {
        int seen = DONE;
        try {
            work();
            return;
        } catch (const std::bad_alloc&) {
            seen = NO_MEMORY;
        } catch (const std::length_error&) {  // a vector larger than any memory
            seen = NO_MEMORY;
        } catch (...) {
            seen = IMPOSSIBLE;
        }
        int before = DONE;
        outcome.compare_exchange_strong(before, seen);
    }
};

// a * b elements, unless there cannot be as many.
inline size_t count(int64_t a, int64_t b) {
    int64_t product;
    if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &product)) throw std::bad_alloc();
    return (size_t)product;
}

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
typedef uint16_t Half16 __attribute__((vector_size(32)));
typedef uint32_t UVec __attribute__((vector_size(64)));
constexpr int W = 16;
constexpr float INF = std::numeric_limits<float>::infinity();

struct bf16 {
    uint16_t bits;
};

inline Vec load(const float* p) {
    Vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline Vec load(const bf16* p) {
    Half16 x;
    std::memcpy(&x, p, sizeof x);
    UVec wide = __builtin_convertvector(x, UVec) << 16;
    Vec y;
    std::memcpy(&y, &wide, sizeof y);
    return y;
}

inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }

// To nearest, ties to even, as PyTorch rounds.
inline void store(bf16* p, Vec x) {
    UVec u;
    std::memcpy(&u, &x, sizeof u);
    u += 0x7fffu + ((u >> 16) & 1u);
    Half16 y = __builtin_convertvector(u >> 16, Half16);
    std::memcpy(p, &y, sizeof y);
}

template <class T>
inline Vec as_stored(Vec x) {
    T buffer[W];
    store(buffer, x);
    return load(buffer);
}

inline Vec all(float x) { return Vec{} + x; }

// Halves of halves stay in registers; a loop over an array of 16 would go through memory.
inline float sum(Vec x) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    Eight a, b;
    std::memcpy(&a, &x, sizeof a);
    std::memcpy(&b, reinterpret_cast<const char*>(&x) + sizeof a, sizeof b);
    a += b;
    Four c, d;
    std::memcpy(&c, &a, sizeof c);
    std::memcpy(&d, reinterpret_cast<const char*>(&a) + sizeof c, sizeof d);
    c += d;
    return (c[0] + c[2]) + (c[1] + c[3]);
}

// e^x for x <= 0, 0 below -87; within 2 units in the last place.
inline Vec exp_negative(Vec x) {
    Vec t = x * 1.44269504f;
    Vec floor = __builtin_convertvector(__builtin_convertvector(t - 0.5f, IVec), Vec);  // truncates, t <= 0: rounds
    Vec f = x - floor * 0.693359375f + floor * 2.12194440e-4f;
    Vec p = all(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    IVec bits = (__builtin_convertvector(floor, IVec) + 127) << 23;
    Vec scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return x < -87.0f ? Vec{} : p * scale;
}

// ---- attention -------------------------------------------------------------------------------------------------------

constexpr int TILE = 32;  // slots whose logits are taken at once

struct Attention {
    int64_t requests, heads, groups, size, value_size, block, splits, threads;
    int64_t q_r, q_h, k_n, k_t, k_h, v_n, v_t, v_h, n_n, n_t, n_h, b_r;
    float scale;
};

struct Part {  // of one query head: softmax sums of some of its slots
    float peak = -INF, total = 0;
    Vec* sums;
};

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IVec{__VA_ARGS__})
#endif

// The sums of 16 vectors, in one vector: halves of two vectors are added side by side until one number of each is left.
// A fifth of the work of 16 sums taken one by one.
inline Vec sums_of(Vec* x) {
    for (int i = 0; i < 8; ++i)
        x[i] = SHUFFLE(x[i], x[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(x[i], x[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; ++i)
        x[i] = SHUFFLE(x[i], x[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               SHUFFLE(x[i], x[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; ++i)
        x[i] = SHUFFLE(x[i], x[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLE(x[i], x[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return SHUFFLE(x[0], x[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           SHUFFLE(x[0], x[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

// Takes a tile of slots into the sums of G query heads. D: vectors per key and value. 0: not known to the compiler.
template <int G, int D, class T>
void absorb(const Attention& a, const Vec* query, const T* keys, const T* values, const float* log_degree, int slots,
            Part* parts, float* logits) {
    const int groups = G ? G : a.groups, dk = D ? D : a.size / W, dv = D ? D : a.value_size / W;
    float bias[TILE];
    for (int s = 0; s < TILE; ++s) bias[s] = s < slots ? log_degree[s * a.n_t] : -INF;
    for (int start = 0; start < TILE && start < slots; start += W) {
        const int count = std::min(W, slots - start);
        for (int g0 = 0; g0 < groups; g0 += G ? G : 1) {
            Vec dots[G ? G : 1][W] = {};
            for (int s = 0; s < count; ++s) {
                const T* key = keys + (start + s) * a.k_t;
                Vec k[D ? D : 64];
                for (int i = 0; i < dk; ++i) k[i] = load(key + i * W);
                for (int g = 0; g < (G ? G : 1); ++g) {
                    Vec dot{};
                    for (int i = 0; i < dk; ++i) dot += query[(g0 + g) * dk + i] * k[i];
                    dots[g][s] = dot;
                }
            }
            for (int g = 0; g < (G ? G : 1); ++g)
                store(logits + (g0 + g) * TILE + start, sums_of(dots[g]) + load(bias + start));
        }
    }
    for (int g = 0; g < groups; ++g) {
        float* row = logits + g * TILE;
        if (slots <= W) store(row + W, all(-INF));
        Part& part = parts[g];
        float peak = -INF;
        for (int s = 0; s < slots; ++s) {
            if (row[s] > peak) peak = row[s];
            if (row[s] != row[s]) part.total = row[s];  // a NaN is told on, as PyTorch does
        }
        if (peak > part.peak) {
            const float shrink = part.peak == -INF ? 0.0f : std::exp(part.peak - peak);
            part.total *= shrink;
            for (int i = 0; i < dv; ++i) part.sums[i] *= shrink;
            part.peak = peak;
        }
        Vec total{};
        for (int s = 0; s < TILE; s += W) {
            const Vec weight = part.peak == -INF ? Vec{} : exp_negative(load(row + s) - part.peak);
            total += weight;
            store(row + s, weight);
        }
        part.total += sum(total);
    }
    // Sums stay in registers over the tile; a few vectors at a time, as many as there are registers for.
    constexpr int AT_ONCE = G == 0 || G > 4 ? 2 : 4;
    for (int g0 = 0; g0 < groups; g0 += G ? G : 1)
        for (int i0 = 0; i0 < dv; i0 += AT_ONCE) {
            const int wide = D % AT_ONCE == 0 && D ? AT_ONCE : std::min(AT_ONCE, dv - i0);
            Vec sums[G ? G : 1][AT_ONCE];
            for (int g = 0; g < (G ? G : 1); ++g)
                for (int i = 0; i < wide; ++i) sums[g][i] = parts[g0 + g].sums[i0 + i];
            for (int s = 0; s < slots; ++s) {
                if (bias[s] == -INF) continue;  // whatever an empty slot holds
                Vec v[AT_ONCE];
                for (int i = 0; i < wide; ++i) v[i] = load(values + s * a.v_t + (i0 + i) * W);
                for (int g = 0; g < (G ? G : 1); ++g)
                    for (int i = 0; i < wide; ++i) sums[g][i] += logits[(g0 + g) * TILE + s] * v[i];
            }
            for (int g = 0; g < (G ? G : 1); ++g)
                for (int i = 0; i < wide; ++i) parts[g0 + g].sums[i0 + i] = sums[g][i];
        }
}

template <int D, class T>
auto absorber(int64_t groups) {
    switch (groups) {
        case 1: return absorb<1, D, T>;
        case 2: return absorb<2, D, T>;
        case 3: return absorb<3, D, T>;
        case 4: return absorb<4, D, T>;
        case 8: return absorb<8, D, T>;
        default: return absorb<0, D, T>;
    }
}

template <class T>
auto absorber(const Attention& a) {
    if (a.size == 64 && a.value_size == 64) return absorber<4, T>(a.groups);
    if (a.size == 128 && a.value_size == 128) return absorber<8, T>(a.groups);
    return absorber<0, T>(a.groups);
}

template <class T>
int attend(const Attention& a, const T* query, const T* keys, const T* values, const float* log_degree,
           const int32_t* table, const int32_t* lengths, T* out) {
    const int dk = a.size / W, dv = a.value_size / W;
    const int64_t pairs = count(a.requests, a.heads), tasks = count(pairs, a.splits);
    const int64_t parts = count(tasks, a.groups);
    std::vector<Vec> all_sums(count(parts, dv), Vec{});
    std::vector<Part> all_parts(parts);
    for (int64_t i = 0; i < parts; ++i) all_parts[i].sums = all_sums.data() + i * dv;
    const auto take = absorber<T>(a);
    Fault fault;
    const auto carry_out = [&](int64_t task) {
        const int64_t r = task / a.splits / a.heads, h = task / a.splits % a.heads, split = task % a.splits;
        const int64_t length = lengths[r], blocks = (length + a.block - 1) / a.block;
        const int64_t first = blocks * split / a.splits, last = blocks * (split + 1) / a.splits;
        std::vector<Vec> scaled(a.groups * dk);
        std::vector<float> logits(a.groups * TILE);
        for (int g = 0; g < a.groups; ++g)
            for (int i = 0; i < dk; ++i)
                scaled[g * dk + i] = load(query + r * a.q_r + (h * a.groups + g) * a.q_h + i * W) * a.scale;
        for (int64_t b = first; b < last; ++b) {
            const int64_t n = table[r * a.b_r + b], slots = std::min(a.block, length - b * a.block);
            for (int64_t s = 0; s < slots; s += TILE)
                take(a, scaled.data(), keys + n * a.k_n + h * a.k_h + s * a.k_t,
                     values + n * a.v_n + h * a.v_h + s * a.v_t, log_degree + n * a.n_n + h * a.n_h + s * a.n_t,
                     (int)std::min<int64_t>(TILE, slots - s), &all_parts[task * a.groups], logits.data());
        }
    };
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
    for (int64_t task = 0; task < tasks; ++task)
        if (fault.none()) fault.guard([&] { carry_out(task); });
    if (!fault.none()) return fault.told();
    for (int64_t pair = 0; pair < pairs; ++pair)
        for (int64_t g = 0; g < a.groups; ++g) {
            float peak = -INF, total = 0;
            for (int64_t s = 0; s < a.splits; ++s)
                peak = std::max(peak, all_parts[(pair * a.splits + s) * a.groups + g].peak);
            std::vector<Vec> sums(dv, Vec{});
            for (int64_t s = 0; s < a.splits && peak > -INF; ++s) {
                const Part& part = all_parts[(pair * a.splits + s) * a.groups + g];
                const float weight = part.peak == -INF ? 0.0f : std::exp(part.peak - peak);
                total += weight * part.total;
                for (int i = 0; i < dv; ++i) sums[i] += weight * part.sums[i];
            }
            T* o = out + (pair * a.groups + g) * a.value_size;
            for (int i = 0; i < dv; ++i) store(o + i * W, total == 0 ? Vec{} : sums[i] / total);
        }
    return DONE;
}

// ---- rounds ----------------------------------------------------------------------------------------------------------

struct Rounds {
    int64_t rows, slots, final, size, value_size, chunk, rounds, threads;
    int64_t k_r, k_t, v_r, v_t;  // strides of keys and values between (batch times) heads and between slots
    int64_t by_chunk;            // 1: every chunk removes its share; 0: the best of all chunks are removed
    float step;                  // similarities are rounded to multiples of this; 0: they are not
};

constexpr float SAFE = 1.152921504606847e18f;  // 2^60: norms within [1 / SAFE, SAFE] can be squared and multiplied
constexpr float LARGE = 4.253529586511731e37f;  // 2^125: differences of numbers below it, and means taken by them, are finite

// One head on its way through the rounds. Rows never move: the list of free slots shrinks.
template <class T>
struct Head {
    const Rounds& p;
    std::vector<float> keys, values, inverse;  // of free slots only; inverse norms
    std::vector<float> degree;
    std::vector<int64_t> free;
    std::vector<float> score, targets;
    std::vector<int64_t> source, target, order, next, first;
    bool safe = true;

    explicit Head(const Rounds& p)
        : p(p), keys(count(p.slots, p.size)), values(count(p.slots, p.value_size)), inverse(p.slots), degree(p.slots),
          targets(count((p.chunk / 2 + W - 1) / W * W, p.size)), first(p.slots, -1) {}

    void note(int64_t slot) {
        Vec square{};
        for (int64_t i = 0; i < p.size; i += W) {
            Vec x = load(&keys[slot * p.size + i]);
            square += x * x;
        }
        const float norm = std::sqrt(sum(square));
        if (!(norm < SAFE) || (norm > 0 && norm < 1 / SAFE)) safe = false;
        if (norm == 0)  // a tiny key whose squares vanish is not a zero key
            for (int64_t i = 0; i < p.size; ++i) safe = safe && keys[slot * p.size + i] == 0;
        inverse[slot] = norm > 0 ? 1 / norm : 0;
    }

    void begin(const T* k, const T* v, const float* n, const uint8_t* is_free) {
        free.clear();
        safe = true;
        for (int64_t slot = 0; slot < p.slots; ++slot) {
            degree[slot] = n[slot];
            if (!is_free[slot]) continue;
            free.push_back(slot);
            for (int64_t i = 0; i < p.size; i += W) store(&keys[slot * p.size + i], load(k + slot * p.k_t + i));
            IVec beyond{};
            for (int64_t i = 0; i < p.value_size; i += W) {
                const Vec x = load(v + slot * p.v_t + i);
                beyond |= (x > LARGE) | (x < -LARGE);
                store(&values[slot * p.value_size + i], x);
            }
            for (int w = 0; w < W; ++w) safe = safe && !beyond[w];
            note(slot);
        }
    }

    // Best targets of all sources of one chunk, places [start, start + length) of the free slots.
    void propose(int64_t start, int64_t length) {
        const int64_t count = length / 2, padded = (count + W - 1) / W * W, sources = (length + 1) / 2;
        for (int64_t j = 0; j < padded; ++j) {
            const float* k = j < count ? &keys[free[start + 2 * j + 1] * p.size] : nullptr;
            const float scale = k ? inverse[free[start + 2 * j + 1]] : 0;
            for (int64_t d = 0; d < p.size; ++d) targets[d * padded + j] = k ? k[d] * scale : 0;
        }
        constexpr int ROWS = 4, COLUMNS = 4;  // sources by vectors of targets held in registers
        for (int64_t i = 0; i < sources; i += ROWS) {
            const int64_t rows = std::min<int64_t>(ROWS, sources - i);
            const float* k[ROWS];
            for (int64_t r = 0; r < ROWS; ++r) k[r] = &keys[free[start + 2 * (i + std::min(r, rows - 1))] * p.size];
            float best[ROWS];
            int64_t which[ROWS];
            std::fill(best, best + ROWS, -INF);
            std::fill(which, which + ROWS, 0);
            for (int64_t j = 0; j < padded; j += COLUMNS * W) {
                const int64_t columns = std::min<int64_t>(COLUMNS, (padded - j) / W);
                Vec products[ROWS][COLUMNS] = {};
                if (columns == COLUMNS)
                    for (int64_t d = 0; d < p.size; ++d) {
                        const float* t = &targets[d * padded + j];
                        for (int c = 0; c < COLUMNS; ++c) {
                            const Vec x = load(t + c * W);
                            for (int r = 0; r < ROWS; ++r) products[r][c] += x * k[r][d];
                        }
                    }
                else
                    for (int64_t d = 0; d < p.size; ++d)
                        for (int c = 0; c < columns; ++c) {
                            const Vec x = load(&targets[d * padded + j + c * W]);
                            for (int r = 0; r < ROWS; ++r) products[r][c] += x * k[r][d];
                        }
                for (int64_t r = 0; r < rows; ++r) {
                    const float scale = inverse[free[start + 2 * (i + r)]];
                    for (int64_t c = 0; c < columns; ++c) {
                        float s[W];
                        store(s, p.step > 0 ? products[r][c] * (scale / p.step) : products[r][c] * scale);
                        if (p.step > 0)
                            for (int w = 0; w < W; ++w) s[w] = std::nearbyint(s[w]);
                        float most = -INF;
                        const int64_t real = std::min<int64_t>(W, count - j - c * W);
                        for (int64_t w = 0; w < real; ++w) most = std::max(most, s[w]);
                        if (most > best[r]) {  // ties go to the earliest target
                            best[r] = most;
                            which[r] = j + c * W + (std::find(s, s + real, most) - s);
                        }
                    }
                }
            }
            for (int64_t r = 0; r < rows; ++r) {
                score.push_back(best[r]);
                source.push_back(start + 2 * (i + r));
                target.push_back(start + 2 * which[r] + 1);
            }
        }
    }

    void round(int64_t edges) {
        score.clear(), source.clear(), target.clear();
        const int64_t n = free.size();
        std::vector<int64_t> ends;  // of the chunks' proposals
        for (int64_t start = 0; start + 1 < n; start += p.chunk) {
            propose(start, std::min(p.chunk, n - start));
            if (p.by_chunk) ends.push_back(score.size());
        }
        if (!p.by_chunk) ends.push_back(score.size());
        if (edges < 1 || edges > (int64_t)score.size()) throw std::invalid_argument("more merges than sources");
        order.resize(score.size());
        std::iota(order.begin(), order.end(), 0);
        int64_t taken = 0, from = 0;
        for (int64_t end : ends) {  // the first of `order` become those that are carried out
            const int64_t quota = edges * end / (int64_t)score.size() - taken;  // as share_out in matching/bipartite.py
            std::nth_element(order.begin() + from, order.begin() + from + quota, order.begin() + end,
                             [&](int64_t a, int64_t b) {
                                 return score[a] != score[b] ? score[a] > score[b] : a < b;  // ties: earliest source
                             });
            std::copy(order.begin() + from, order.begin() + from + quota, order.begin() + taken);
            taken += quota, from = end;
        }
        std::sort(order.begin(), order.begin() + edges);
        // Sources of one target, latest first, as a linked list through `first` and `next`.
        next.assign(edges, -1);
        std::vector<int64_t> touched;
        for (int64_t e = 0; e < edges; ++e) {
            int64_t& head = first[free[target[order[e]]]];
            if (head < 0) touched.push_back(free[target[order[e]]]);
            next[e] = head, head = e;
        }
        for (int64_t b : touched) merge(b);
        std::vector<uint8_t> leaves(n, 0);
        for (int64_t e = 0; e < edges; ++e) leaves[source[order[e]]] = 1;
        int64_t kept = 0;
        for (int64_t i = 0; i < n; ++i)
            if (!leaves[i]) free[kept++] = free[i];
        free.resize(kept);
    }

    void merge(int64_t b) {
        float mass = degree[b];
        for (int64_t e = first[b]; e >= 0; e = next[e]) mass += degree[free[source[order[e]]]];
        for (auto [x, size] : {std::pair{keys.data(), p.size}, std::pair{values.data(), p.value_size}})
            for (int64_t i = 0; i < size; i += W) {
                const Vec own = load(x + b * size + i);
                Vec pull{};
                for (int64_t e = first[b]; e >= 0; e = next[e]) {
                    const int64_t a = free[source[order[e]]];
                    pull += (degree[a] / mass) * (load(x + a * size + i) - own);
                }
                store(x + b * size + i, as_stored<T>(own + pull));
            }
        degree[b] = mass;
        first[b] = -1;
        note(b);
    }
};

template <class T>
int run(const Rounds& p, const T* keys, const T* values, const float* degree, const uint8_t* free,
        const int64_t* removed, T* out_keys, T* out_values, float* out_degree, int64_t* origin) {
    std::atomic<bool> safe{true};
    Fault fault;
    const auto carry_out = [&](Head<T>& head, int64_t row) {
        const T* k = keys + row * p.k_r;
        const T* v = values + row * p.v_r;
        const uint8_t* is_free = free + row * p.slots;
        head.begin(k, v, degree + row * p.slots, is_free);
        const int64_t set_aside = p.slots - (int64_t)head.free.size();
        for (int64_t r = 0; r < p.rounds && head.safe; ++r) head.round(removed[r]);
        if (!head.safe) {
            safe = false;
            return;
        }
        if (set_aside + (int64_t)head.free.size() != p.final) throw std::invalid_argument("heads of unequal lengths");
        int64_t to = row * p.final, next = 0;
        for (int64_t slot = 0; slot < p.slots; ++slot) {
            const bool survives = next < (int64_t)head.free.size() && head.free[next] == slot;
            if (is_free[slot] && !survives) continue;
            next += survives;
            for (int64_t i = 0; i < p.size; i += W)
                store(out_keys + to * p.size + i,
                      survives ? load(&head.keys[slot * p.size + i]) : load(k + slot * p.k_t + i));
            for (int64_t i = 0; i < p.value_size; i += W)
                store(out_values + to * p.value_size + i,
                      survives ? load(&head.values[slot * p.value_size + i]) : load(v + slot * p.v_t + i));
            out_degree[to] = head.degree[slot];
            origin[to++] = slot;
        }
    };
#pragma omp parallel num_threads(p.threads)
    {
        std::optional<Head<T>> head;
        fault.guard([&] { head.emplace(p); });
#pragma omp for schedule(dynamic)  // reached by every thread, also by one without memory for a head
        for (int64_t row = 0; row < p.rows; ++row)
            if (head && fault.none()) fault.guard([&] { carry_out(*head, row); });
    }
    if (!fault.none()) return fault.told();
    return safe ? DONE : UNSAFE;
}

template <class Work>
int guarded(const Work& work) noexcept {
    int outcome = DONE;
    Fault fault;
    fault.guard([&] { outcome = work(); });
    return fault.none() ? outcome : fault.told();
}

}  // namespace

// Types: 0 = float32, 1 = bfloat16. See centroidkv/native/__init__.py for the arguments.
extern "C" {

int64_t centroidkv_version() { return 3; }

// An Outcome; where it is not DONE, what is in `out` has no meaning.
int centroidkv_attend(int type, const Attention* a, const void* query, const void* keys, const void* values,
                      const float* log_degree, const int32_t* table, const int32_t* lengths, void* out) {
    return guarded([&] {
        return type == 0 ? attend(*a, (const float*)query, (const float*)keys, (const float*)values, log_degree, table,
                                  lengths, (float*)out)
                         : attend(*a, (const bf16*)query, (const bf16*)keys, (const bf16*)values, log_degree, table,
                                  lengths, (bf16*)out);
    });
}

// An Outcome; UNSAFE if a key's norm is too large or too small to be squared, or a value so large that a difference of
// two may overflow. Only DONE gives the results a meaning.
int centroidkv_rounds(int type, const Rounds* p, const void* keys, const void* values, const float* degree,
                      const uint8_t* free, const int64_t* removed, void* out_keys, void* out_values, float* out_degree,
                      int64_t* origin) {
    return guarded([&] {
        return type == 0 ? run(*p, (const float*)keys, (const float*)values, degree, free, removed, (float*)out_keys,
                               (float*)out_values, out_degree, origin)
                         : run(*p, (const bf16*)keys, (const bf16*)values, degree, free, removed, (bf16*)out_keys,
                               (bf16*)out_values, out_degree, origin);
    });
}
}
