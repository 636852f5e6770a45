/* All statistics of a tensor in one pass over its memory. Plain C without any library, so that one file serves every
 * Python and can be loaded from memory. Called through ctypes, without the interpreter's lock; it keeps no state.
 *
 * A tensor is read in blocks that stay in the first cache. A block is read twice: for its sum, range and zeros, then
 * for its squared differences from its own mean; so a mean of 1000 with a spread of 1 loses nothing. The blocks are
 * combined in double precision: Chan, Golub, LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample
 * Variances, 1979, 2.1. What is not finite shows in a block's sum; only such a block is looked at element by element.
 *
 * Every loop over a block runs in LANES independent lanes, so that the compiler can make vectors of it as it stands,
 * without being allowed to change the order of sums. It does so three times, for three sets of instructions.
 */
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { BLOCK = 2048, LANES = 32 };
enum { F32, F64, F16, BF16 };                                                     /* dtype */
enum { COUNT, MEAN, SQUARES, MIN, MAX, ZEROS, NANS, INFS, NEGATIVE_INFS, FIELDS }; /* COUNT: of finite elements */

#define INF __builtin_inf()

typedef struct {
    double sum, squares, min, max, zeros;
} Block;

typedef struct { /* functions for one set of instructions */
    void (*f32)(const float *, int, Block *);
    void (*f64)(const double *, int, Block *);
    void (*half)(const uint16_t *, int, float *);
    void (*brain)(const uint16_t *, int, float *);
    int (*bounded_16)(const void *, int, uint64_t);
    int (*bounded_32)(const void *, int, uint64_t);
    int (*bounded_64)(const void *, int, uint64_t);
} Set;

static inline uint32_t bits_of(float x) {
    union { float f; uint32_t u; } both = {x};
    return both.u;
}

static inline float from_bits(uint32_t u) {
    union { uint32_t u; float f; } both = {u};
    return both.f;
}

#define FOLD(set, with, name, type, integer)                                                                          \
    with static void name##_##set(const type *restrict x, int n, Block *b) {                                          \
        type sum[LANES], low[LANES], high[LANES], square[LANES];                                                      \
        integer zero[LANES];                                                                                          \
        for (int j = 0; j < LANES; j++)                                                                               \
            sum[j] = square[j] = 0, zero[j] = 0, low[j] = (type)INF, high[j] = (type)-INF;                            \
        int whole = n - n % LANES;                                                                                    \
        for (int i = 0; i < whole; i += LANES)                                                                        \
            for (int j = 0; j < LANES; j++) {                                                                         \
                type v = x[i + j];                                                                                    \
                sum[j] += v;                                                                                          \
                low[j] = v < low[j] ? v : low[j];                                                                     \
                high[j] = v > high[j] ? v : high[j];                                                                  \
                zero[j] += v == 0;                                                                                    \
            }                                                                                                         \
        for (int i = whole, j = 0; i < n; i++, j++) {                                                                 \
            type v = x[i];                                                                                            \
            sum[j] += v;                                                                                              \
            low[j] = v < low[j] ? v : low[j];                                                                         \
            high[j] = v > high[j] ? v : high[j];                                                                      \
            zero[j] += v == 0;                                                                                        \
        }                                                                                                             \
        Block all = {0, 0, INF, -INF, 0};                                                                             \
        for (int j = 0; j < LANES; j++) {                                                                             \
            all.sum += sum[j], all.zeros += (double)zero[j];                                                          \
            all.min = low[j] < all.min ? low[j] : all.min;                                                            \
            all.max = high[j] > all.max ? high[j] : all.max;                                                          \
        }                                                                                                             \
        type mean = (type)(all.sum / n);                                                                              \
        for (int i = 0; i < whole; i += LANES)                                                                        \
            for (int j = 0; j < LANES; j++)                                                                           \
                square[j] += (x[i + j] - mean) * (x[i + j] - mean);                                                   \
        for (int i = whole, j = 0; i < n; i++, j++)                                                                   \
            square[j] += (x[i] - mean) * (x[i] - mean);                                                               \
        for (int j = 0; j < LANES; j++)                                                                               \
            all.squares += square[j];                                                                                 \
        *b = all;                                                                                                     \
    }

#define BRAIN(set, with)                                                                                              \
    with static void brain_##set(const uint16_t *restrict x, int n, float *restrict to) {                             \
        for (int i = 0; i < n; i++)                                                                                   \
            to[i] = from_bits((uint32_t)x[i] << 16);                                                                  \
    }

/* Exact for denormals too; what is beyond 65504 is an infinity or NaN and keeps its bits. */
static void half_plain(const uint16_t *restrict x, int n, float *restrict to) {
    for (int i = 0; i < n; i++) {
        uint32_t magnitude = x[i] & 0x7fffu, sign = (x[i] & 0x8000u) << 16;
        uint32_t finite = bits_of(from_bits(magnitude << 13) * 0x1p112f);
        to[i] = from_bits(sign | finite | (magnitude >= 0x7c00u ? 0x7f800000u : 0));
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) static void half_avx2(const uint16_t *restrict x, int n, float *restrict to) {
    int i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
    half_plain(x + i, n - i, to + i);
}

__attribute__((target("avx512f"))) static void half_avx512(const uint16_t *restrict x, int n, float *restrict to) {
    int i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + i))));
    half_plain(x + i, n - i, to + i);
}
#endif

/* Whether the magnitude of every element is below a limit; read as integers, infinity and NaN are above all numbers. */
#define GATE(set, with, bits, unsigned_type)                                                                          \
    with static int bounded_##bits##_##set(const void *memory, int n, uint64_t limit) {                               \
        const unsigned_type *restrict x = memory, magnitude = (unsigned_type)-1 >> 1;                                 \
        unsigned_type lanes[LANES] = {0}, any = 0, least = (unsigned_type)limit;                                      \
        int whole = n - n % LANES;                                                                                    \
        for (int i = 0; i < whole; i += LANES)                                                                        \
            for (int j = 0; j < LANES; j++)                                                                           \
                lanes[j] |= (x[i + j] & magnitude) >= least;                                                          \
        for (int i = whole; i < n; i++)                                                                               \
            any |= (x[i] & magnitude) >= least;                                                                       \
        for (int j = 0; j < LANES; j++)                                                                               \
            any |= lanes[j];                                                                                          \
        return !any;                                                                                                  \
    }

#define SET(set, with)                                                                                                \
    FOLD(set, with, f32, float, int32_t)                                                                              \
    FOLD(set, with, f64, double, int64_t)                                                                             \
    BRAIN(set, with)                                                                                                  \
    GATE(set, with, 16, uint16_t)                                                                                     \
    GATE(set, with, 32, uint32_t)                                                                                     \
    GATE(set, with, 64, uint64_t)                                                                                     \
    static const Set set = {f32_##set,   f64_##set,     half_##set,   brain_##set,                                    \
                            bounded_16_##set, bounded_32_##set, bounded_64_##set};

SET(plain, )
#if defined(__x86_64__)
SET(avx2, __attribute__((target("avx2,fma"))))
SET(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))))
#endif

/* Whether nothing but -inf is not finite: without the sign and with it no number is above infinity, nor equal to it. */
#define MASKED(bits, unsigned_type)                                                                                   \
    static int masked_##bits(const void *memory, int n, uint64_t infinity) {                                          \
        const unsigned_type *restrict x = memory, magnitude = (unsigned_type)-1 >> 1, inf = (unsigned_type)infinity;  \
        unsigned_type any = 0;                                                                                        \
        for (int i = 0; i < n; i++)                                                                                   \
            any |= (unsigned_type)((x[i] & magnitude) > inf) | (unsigned_type)(x[i] == inf);                          \
        return !any;                                                                                                  \
    }

MASKED(16, uint16_t)
MASKED(32, uint32_t)
MASKED(64, uint64_t)

static void add(double *out, const Block *b, double n) {
    double before = out[COUNT], all = before + n, mean = b->sum / n, delta = mean - out[MEAN];
    if (n == 0)
        return;
    out[COUNT] = all;
    out[MEAN] += delta * (n / all);
    out[SQUARES] += b->squares + delta * delta * (before * (n / all));
    out[MIN] = b->min < out[MIN] ? b->min : out[MIN];
    out[MAX] = b->max > out[MAX] ? b->max : out[MAX];
    out[ZEROS] += b->zeros;
}

/* Give the finite elements of a block, moved together, and count the others. */
#define FINITE(name, type, unsigned_type, magnitude_bits, infinity)                                                   \
    static int finite_##name(const type *x, int n, type *to, double *out) {                                           \
        int kept = 0, nans = 0, infs = 0, negative = 0;                                                               \
        for (int i = 0; i < n; i++) {                                                                                 \
            union { type f; unsigned_type u; } v = {x[i]};                                                            \
            unsigned_type magnitude = v.u & magnitude_bits;                                                           \
            to[kept] = v.f;                                                                                           \
            kept += magnitude < infinity;                                                                             \
            nans += magnitude > infinity;                                                                             \
            infs += v.u == infinity;                                                                                  \
            negative += magnitude == infinity;                                                                        \
        }                                                                                                             \
        out[NANS] += nans, out[INFS] += infs, out[NEGATIVE_INFS] += negative - infs;                                  \
        return kept;                                                                                                  \
    }

FINITE(f32, float, uint32_t, 0x7fffffffu, 0x7f800000u)
FINITE(f64, double, uint64_t, 0x7fffffffffffffffu, 0x7ff0000000000000u)

/* Squares of magnitudes outside of these vanish or overflow in single precision. */
static int is_safe(const Block *b) {
    double peak = -b->min > b->max ? -b->min : b->max;
    return peak == 0 || (peak > 1e-15 && peak < 1e15);
}

static void block_f64(const Set *set, const double *x, int n, double *out) {
    double kept[BLOCK];
    Block b;
    set->f64(x, n, &b);
    if (b.sum - b.sum != 0) { /* NaN, infinity, or a sum that overflowed */
        n = finite_f64(x, n, kept, out);
        set->f64(kept, n, &b);
    }
    add(out, &b, n);
}

static void block_f32(const Set *set, const float *x, int n, double *out) {
    float kept[BLOCK];
    double wide[BLOCK];
    Block b;
    set->f32(x, n, &b);
    if (b.sum - b.sum != 0) {
        n = finite_f32(x, n, kept, out);
        x = kept;
        set->f32(x, n, &b);
    }
    if (!is_safe(&b) || b.sum - b.sum != 0) {
        for (int i = 0; i < n; i++)
            wide[i] = x[i];
        set->f64(wide, n, &b);
    }
    add(out, &b, n);
}

static void block(const Set *set, const void *x, int n, int dtype, double *out) {
    float wide[BLOCK];
    if (dtype == F64)
        block_f64(set, x, n, out);
    else if (dtype == F32)
        block_f32(set, x, n, out);
    else {
        (dtype == F16 ? set->half : set->brain)(x, n, wide);
        block_f32(set, wide, n, out);
    }
}

#define EXPORTED __attribute__((visibility("default")))

/* Who calls this file knows what it takes and gives by this number: hookd/agent/kernel.py. */
EXPORTED int hookd_version(void) {
    return 1;
}

/* What this processor has: 0 for any, 1 for AVX2 with FMA and F16C, 2 for AVX-512 as in Skylake's servers. */
EXPORTED int hookd_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return 1;
#endif
    return 0;
}

static const Set *set_of(int level) {
#if defined(__x86_64__)
    return level == 2 ? &avx512 : level == 1 ? &avx2 : &plain;
#else
    return (void)level, &plain;
#endif
}

static void clear(double *out) {
    for (int i = 0; i < FIELDS; i++)
        out[i] = 0;
    out[MIN] = INF, out[MAX] = -INF;
}

static int size_of(int dtype) {
    return dtype == F64 ? 8 : dtype == F32 ? 4 : 2;
}

/* Summarise n elements that lie side by side. `out` has FIELDS numbers. */
EXPORTED void hookd_summary(const void *x, int64_t n, int dtype, int level, double *out) {
    const Set *set = set_of(level);
    clear(out);
    for (int64_t i = 0; i < n; i += BLOCK)
        block(set, (const char *)x + i * size_of(dtype), (int)(n - i < BLOCK ? n - i : BLOCK), dtype, out);
}

#define GATHER(bits)                                                                                                  \
    static void gather_##bits(const void *from, int64_t stride, int n, void *to) {                                    \
        for (int i = 0; i < n; i++)                                                                                   \
            ((uint##bits##_t *)to)[i] = ((const uint##bits##_t *)from)[i * stride];                                   \
    }

GATHER(16)
GATHER(32)
GATHER(64)

/* Summarise a tensor of gaps: `sizes` (none 0) and `strides`, in elements, of its 1 to 64 dimensions. */
EXPORTED void hookd_summary_strided(const void *x, int dims, const int64_t *sizes, const int64_t *strides, int dtype, int level,
                           double *out) {
    void (*gather)(const void *, int64_t, int, void *) =
        dtype == F64 ? gather_64 : dtype == F32 ? gather_32 : gather_16;
    const Set *set = set_of(level);
    int64_t at[64] = {0}, inner = sizes[dims - 1], stride = strides[dims - 1], width = size_of(dtype);
    uint64_t raw[BLOCK];
    int filled = 0, d;
    clear(out);
    for (;;) {
        int64_t row = 0;
        for (d = 0; d < dims - 1; d++)
            row += at[d] * strides[d];
        for (int64_t i = 0; i < inner;) {
            int n = (int)(inner - i < BLOCK - filled ? inner - i : BLOCK - filled);
            gather((const char *)x + (row + i * stride) * width, stride, n, (char *)raw + filled * width);
            i += n, filled += n;
            if (filled == BLOCK)
                block(set, raw, filled, dtype, out), filled = 0;
        }
        for (d = dims - 2; d >= 0 && ++at[d] == sizes[d]; d--)
            at[d] = 0;
        if (d < 0)
            break;
    }
    if (filled)
        block(set, raw, filled, dtype, out);
}

/* Say what of n elements that lie side by side is not finite: 0 nothing, 1 nothing but -inf, 2 NaN or inf. */
EXPORTED int hookd_is_finite(const void *x, int64_t n, int dtype, int level) {
    static const uint64_t infinity[] = {0x7f800000u, 0x7ff0000000000000u, 0x7c00u, 0x7f80u};
    const Set *set = set_of(level);
    int width = size_of(dtype), found = 0;
    int (*bounded)(const void *, int, uint64_t) =
        width == 8 ? set->bounded_64 : width == 4 ? set->bounded_32 : set->bounded_16;
    int (*masked)(const void *, int, uint64_t) = width == 8 ? masked_64 : width == 4 ? masked_32 : masked_16;
    for (int64_t i = 0; i < n; i += BLOCK) {
        const char *at = (const char *)x + i * width;
        int m = (int)(n - i < BLOCK ? n - i : BLOCK);
        if (bounded(at, m, infinity[dtype]))
            continue;
        if (!masked(at, m, infinity[dtype]))
            return 2;
        found = 1;
    }
    return found;
}
