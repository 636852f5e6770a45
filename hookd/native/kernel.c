/* All statistics of a tensor in one pass over its memory. Plain C without any library, so that one file works with
 * every Python and can be loaded from memory. It is called through ctypes, without the GIL, and keeps no state.
 *
 * A tensor is read in blocks. The elements of a block are summed about the mean of the previous block, so a mean of
 * 1000 with a spread of 1 loses no precision. Nor does a difference between the blocks' means, because it is part of
 * the tensor's own spread. The first block is summed about the mean of its first elements. The blocks are combined in
 * double precision: Chan, Golub, LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances,
 * 1979, 2.1. An element that is not finite shows in its block's sum; only such a block is examined element by element.
 *
 * Every loop over a block runs in independent lanes, as many as fit in two registers, so that the compiler can
 * vectorize it as it stands, without permission to reorder sums. It does so for three instruction sets.
 */
#include <stdint.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

enum { BLOCK = 2048, SAMPLE = 256 };
enum { F32, F64, F16, BF16 }; /* dtype */
enum { COUNT, MEAN, SQUARES, MIN, MAX, ZEROS, NANS, INFS, NEGATIVE_INFS, SHIFT, FIELDS };
/* COUNT: number of finite elements; MEAN to MAX are of these, too. SQUARES: sum of their squared differences from the
 * mean. SHIFT: the last block's mean. */

#define INF __builtin_inf()
#define EXPORTED __attribute__((visibility("default")))

typedef uint32_t __attribute__((may_alias, aligned(2))) Pair; /* two 16-bit elements */

typedef struct { /* of a block: the sums of the elements' differences from `shift` and of the squares of these, and the other statistics */
    double sum, squares, min, max, zeros, shift;
} Block;

typedef struct { /* functions for one instruction set */
    void (*f32)(const float *, int, double, Block *);
    void (*f64)(const double *, int, double, Block *);
    void (*ends_f32)(const float *, int, double, Block *);
    void (*ends_f64)(const double *, int, double, Block *);
    void (*ends_brain)(const uint16_t *, int, Block *);
    void (*half)(const uint16_t *, int, float *);
    void (*brain)(const uint16_t *, int, float *);
    uint64_t (*most_16)(const void *, int);
    uint64_t (*most_32)(const void *, int);
    uint64_t (*most_64)(const void *, int);
} Set;

static inline uint32_t bits_of(float x) {
    union { float f; uint32_t u; } both = {x};
    return both.u;
}

static inline float from_bits(uint32_t u) {
    union { uint32_t u; float f; } both = {u};
    return both.f;
}

/* gcc 12 unrolls loops of up to eight lanes before it vectorizes, and then finds nothing to vectorize: four times
 * slower. */
#define LANES _Pragma("GCC unroll 1")

/* Sum n elements, finite or not, about `shift`; without `all`, only their squares about 0, and their ends. */
#define FOLD(set, with, name, type, integer, lanes, all)                                                              \
    with static void name##_##set(const type *restrict x, int n, double about, Block *b) {                            \
        type sum[lanes], low[lanes], high[lanes], square[lanes], shift = (type)about;                                 \
        integer zero[lanes];                                                                                          \
        for (int j = 0; j < lanes; j++)                                                                               \
            sum[j] = square[j] = 0, zero[j] = 0, low[j] = (type)INF, high[j] = (type)-INF;                            \
        int whole = n - n % lanes;                                                                                    \
        for (int i = 0; i < whole; i += lanes)                                                                        \
            LANES for (int j = 0; j < lanes; j++)                                                                     \
                FOLD_ONE(x[i + j], all)                                                                               \
        for (int i = whole, j = 0; i < n; i++, j++)                                                                   \
            FOLD_ONE(x[i], all)                                                                                       \
        Block total = {0, 0, INF, -INF, 0, shift};                                                                    \
        for (int j = 0; j < lanes; j++) {                                                                             \
            total.sum += sum[j], total.squares += square[j], total.zeros += (double)zero[j];                          \
            total.min = low[j] < total.min ? low[j] : total.min;                                                      \
            total.max = high[j] > total.max ? high[j] : total.max;                                                    \
        }                                                                                                             \
        *b = total;                                                                                                   \
    }

#define FOLD_ONE(element, all)                                                                                        \
    {                                                                                                                 \
        __typeof__(sum[0]) v = element, d = all ? v - shift : v;                                                      \
        square[j] += d * d;                                                                                           \
        low[j] = v < low[j] ? v : low[j];                                                                             \
        high[j] = v > high[j] ? v : high[j];                                                                          \
        if (all)                                                                                                      \
            sum[j] += d, zero[j] -= -(v == 0);                                                                        \
    }

/* Convert in pairs, which fills a register at once; the order of the elements does not matter. */
#define BRAIN(set, with)                                                                                              \
    with static void brain_##set(const uint16_t *restrict x, int n, float *restrict to) {                             \
        const Pair *restrict pairs = (const Pair *)(const void *)x;                                                   \
        float *restrict odd = to + n / 2;                                                                             \
        for (int i = 0; i < n / 2; i++) {                                                                             \
            to[i] = from_bits(pairs[i] << 16);                                                                        \
            odd[i] = from_bits(pairs[i] & 0xffff0000u);                                                               \
        }                                                                                                             \
        if (n % 2)                                                                                                    \
            to[n - 1] = from_bits((uint32_t)x[n - 1] << 16);                                                          \
    }

/* The same as `ends_f32` of the converted elements, of which there is no array. */
#define ENDS_BRAIN(set, with, lanes)                                                                                  \
    with static void ends_brain_##set(const uint16_t *restrict x, int n, Block *b) {                                  \
        const Pair *restrict pairs = (const Pair *)(const void *)x;                                                   \
        float square[lanes], low[lanes], high[lanes];                                                                 \
        for (int j = 0; j < lanes; j++)                                                                               \
            square[j] = 0, low[j] = (float)INF, high[j] = (float)-INF;                                                \
        int whole = n / 2 / lanes * lanes;                                                                            \
        for (int i = 0; i < whole; i += lanes)                                                                        \
            LANES for (int j = 0; j < lanes; j++) {                                                                   \
                float v = from_bits(pairs[i + j] << 16), w = from_bits(pairs[i + j] & 0xffff0000u);                   \
                square[j] += v * v;                                                                                   \
                square[j] += w * w;                                                                                   \
                low[j] = v < low[j] ? v : low[j];                                                                     \
                low[j] = w < low[j] ? w : low[j];                                                                     \
                high[j] = v > high[j] ? v : high[j];                                                                  \
                high[j] = w > high[j] ? w : high[j];                                                                  \
            }                                                                                                         \
        Block total = {0, 0, INF, -INF, 0, 0};                                                                        \
        for (int i = 2 * whole; i < n; i++) {                                                                         \
            float v = from_bits((uint32_t)x[i] << 16);                                                                \
            total.squares += v * v;                                                                                   \
            total.min = v < total.min ? v : total.min;                                                                \
            total.max = v > total.max ? v : total.max;                                                                \
        }                                                                                                             \
        for (int j = 0; j < lanes; j++) {                                                                             \
            total.squares += square[j];                                                                               \
            total.min = low[j] < total.min ? low[j] : total.min;                                                      \
            total.max = high[j] > total.max ? high[j] : total.max;                                                    \
        }                                                                                                             \
        *b = total;                                                                                                   \
    }

/* Exact for denormals too. A magnitude beyond 65504 is an infinity or NaN and keeps its bits. */
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

/* The largest magnitude, as bits. Read as integers, magnitudes keep their order, and infinity and NaN are the largest. */
#define MOST(set, with, bits, type, lanes)                                                                            \
    with static uint64_t most_##bits##_##set(const void *memory, int n) {                                              \
        const type *restrict x = memory, magnitude = (type)(~(uint64_t)0 >> (65 - bits));                             \
        type most[lanes] = {0};                                                                                       \
        int whole = n - n % lanes;                                                                                    \
        for (int i = 0; i < whole; i += lanes)                                                                        \
            for (int j = 0; j < lanes; j++) {                                                                         \
                type m = x[i + j] & magnitude;                                                                        \
                most[j] = m > most[j] ? m : most[j];                                                                  \
            }                                                                                                         \
        for (int i = whole, j = 0; i < n; i++, j++) {                                                                 \
            type m = x[i] & magnitude;                                                                                \
            most[j] = m > most[j] ? m : most[j];                                                                      \
        }                                                                                                             \
        for (int j = 0; j < lanes; j++)                                                                               \
            most[0] = most[j] > most[0] ? most[j] : most[0];                                                          \
        return (uint64_t)most[0];                                                                                     \
    }

#define SET(set, with, bytes)                                                                                         \
    FOLD(set, with, f32, float, int32_t, (bytes / 2), 1)                                                              \
    FOLD(set, with, f64, double, int64_t, (bytes / 4), 1)                                                             \
    FOLD(set, with, ends_f32, float, int32_t, (bytes / 2), 0)                                                           \
    FOLD(set, with, ends_f64, double, int64_t, (bytes / 4), 0)                                                        \
    BRAIN(set, with)                                                                                                  \
    ENDS_BRAIN(set, with, (bytes / 4))                                                                                \
    MOST(set, with, 16, int16_t, (2 * bytes))                                                                         \
    MOST(set, with, 32, int32_t, bytes)                                                                               \
    MOST(set, with, 64, int64_t, (bytes / 2))                                                                         \
    static const Set set = {f32_##set,  f64_##set,   ends_f32_##set, ends_f64_##set, ends_brain_##set,                \
                            half_##set, brain_##set, most_16_##set,  most_32_##set,  most_64_##set};

SET(plain, , 16)
#if defined(__x86_64__)
SET(avx2, __attribute__((target("avx2,fma"))), 32)
SET(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))), 64)
#endif

/* Whether -inf is the only value that is not finite: no magnitude is above infinity (a NaN), and no value equals +inf. */
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

/* Add the sums of n finite elements to those of all previous ones. */
static void add(double *out, const Block *b, double n) {
    double off = b->sum / n, squares = b->squares - b->sum * off;
    double before = out[COUNT], all = before + n, delta = b->shift + off - out[MEAN];
    if (n == 0)
        return;
    out[COUNT] = all;
    out[MEAN] += delta * (n / all);
    out[SQUARES] += (squares > 0 ? squares : 0) + delta * delta * (before * (n / all));
    out[MIN] = b->min < out[MIN] ? b->min : out[MIN];
    out[MAX] = b->max > out[MAX] ? b->max : out[MAX];
    out[ZEROS] += b->zeros;
    out[SHIFT] = b->shift + off;
}

/* Store the finite elements of a block side by side, and count the others. Return the number of finite ones. */
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

/* Squares of magnitudes outside of this range underflow or overflow in single precision. */
static int is_safe(const Block *b) {
    double peak = -b->min > b->max ? -b->min : b->max;
    return peak == 0 || (peak > 1e-15 && peak < 1e15);
}

/* Whether an element is not finite, or a sum has overflowed. */
static int is_odd(const Block *b) {
    return b->sum - b->sum != 0 || b->squares - b->squares != 0;
}

#define BLOCKS(name, type)                                                                                            \
    /* Sum about the last block's mean, or about the mean of the first elements if there is none. */                  \
    static void about_mean_##name(const Set *set, const type *x, int n, const double *out, Block *b) {                \
        double shift = out[SHIFT];                                                                                    \
        if (out[COUNT] == 0 && n) {                                                                                   \
            int m = n < SAMPLE ? n : SAMPLE;                                                                          \
            set->name(x, m, x[0], b);                                                                                 \
            shift = b->shift + b->sum / m;                                                                            \
            shift = shift - shift == 0 ? shift : 0;                                                                   \
        }                                                                                                             \
        set->name(x, n, shift, b);                                                                                    \
    }

BLOCKS(f32, float)
BLOCKS(f64, double)

static void block_f64(const Set *set, const double *x, int n, double *out) {
    double kept[BLOCK];
    Block b;
    about_mean_f64(set, x, n, out, &b);
    if (is_odd(&b)) {
        n = finite_f64(x, n, kept, out);
        about_mean_f64(set, kept, n, out, &b);
    }
    add(out, &b, n);
}

static void block_f32(const Set *set, const float *x, int n, double *out) {
    float kept[BLOCK];
    double wide[BLOCK];
    Block b;
    about_mean_f32(set, x, n, out, &b);
    if (is_odd(&b)) {
        n = finite_f32(x, n, kept, out);
        x = kept;
        about_mean_f32(set, x, n, out, &b);
    }
    if (!is_safe(&b) || is_odd(&b)) {
        for (int i = 0; i < n; i++)
            wide[i] = x[i];
        about_mean_f64(set, wide, n, out, &b);
    }
    add(out, &b, n);
}

/* Add the squares of n elements about 0, and their ends, to those of all previous ones. */
static void extent_wide(const Set *set, const double *x, int n, double *out) {
    double kept[BLOCK];
    Block b;
    set->ends_f64(x, n, 0, &b);
    if (is_odd(&b)) {
        n = finite_f64(x, n, kept, out);
        set->ends_f64(kept, n, 0, &b);
    }
    out[COUNT] += n, out[SQUARES] += b.squares;
    out[MIN] = b.min < out[MIN] ? b.min : out[MIN];
    out[MAX] = b.max > out[MAX] ? b.max : out[MAX];
}

static void extent(const Set *set, const void *x, int n, int dtype, double *out) {
    float narrow[BLOCK];
    double wide[BLOCK];
    Block b;
    if (dtype == F64) {
        extent_wide(set, x, n, out);
        return;
    }
    if (dtype == F16)
        set->half(x, n, narrow), x = narrow;
    if (dtype == BF16)
        set->ends_brain(x, n, &b);
    else
        set->ends_f32(x, n, 0, &b);
    if (is_safe(&b) && !is_odd(&b)) {
        out[COUNT] += n, out[SQUARES] += b.squares;
        out[MIN] = b.min < out[MIN] ? b.min : out[MIN];
        out[MAX] = b.max > out[MAX] ? b.max : out[MAX];
        return;
    }
    if (dtype == BF16)
        brain_plain(x, n, narrow), x = narrow;
    for (int i = 0; i < n; i++)
        wide[i] = ((const float *)x)[i];
    extent_wide(set, wide, n, out);
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

/* Return the version of this interface; hookd/target/tensors/kernel.py compares it. */
EXPORTED int hookd_version(void) {
    return 4;
}

/* Return the instruction set that this processor has and the system supports: 0 for any, 1 for AVX2 with FMA and F16C,
 * 2 for AVX-512 as in Skylake servers. The processor is queried directly: the compilers' own builtins for this need
 * one of their libraries. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, 14.3 and
 * 15.2. */
EXPORTED int hookd_level(void) {
#if defined(__x86_64__)
    enum { FMA = 1 << 12, OSXSAVE = 1 << 27, F16C = 1 << 29 };            /* in leaf 1, ecx */
    enum { AVX2 = 1 << 5, F = 1 << 16, DQ = 1 << 17, BW = 1 << 30 };      /* in leaf 7, ebx; the highest bit is VL */
    enum { YMM = 6, ZMM = 0xe6 };                                         /* in XCR0: the registers that the system saves */
    uint32_t eax, ebx, ecx, edx, of_one, saved;
    if (!__get_cpuid(1, &eax, &ebx, &of_one, &edx) || !(of_one & OSXSAVE) || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0));
    const uint32_t wide = F | DQ | BW | 1u << 31;
    if ((saved & ZMM) == ZMM && (ebx & wide) == wide)
        return 2;
    if ((saved & YMM) == YMM && (of_one & (FMA | F16C)) == (FMA | F16C) && ebx & AVX2)
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

/* Summarize n adjacent elements. `out` has FIELDS numbers. */
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

/* Summarize a tensor with gaps: `sizes` (none is 0) and `strides`, in elements, of its 1 to 64 dimensions. */
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

/* -- digests: XXH3 with 64 bits, the default secret and seed 0, as https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
 * defines it. Numbers are read as this machine stores them, which is little endian on all that hookd supports. */

enum { STRIPE = 64, STRIPES = 16, CHUNK = STRIPE * STRIPES, SECRET = 192 };
#define PRIME32_1 0x9e3779b1u
#define PRIME32_2 0x85ebca77u
#define PRIME32_3 0xc2b2ae3du
#define PRIME64_1 0x9e3779b185ebca87u
#define PRIME64_2 0xc2b2ae3d27d4eb4fu
#define PRIME64_3 0x165667b19e3779f9u
#define PRIME64_4 0x85ebca77c2b2ae63u
#define PRIME64_5 0x27d4eb2f165667c5u
#define MIX_1 0x165667919e3779f9u
#define MIX_2 0x9fb21c651e98df25u

static const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef uint64_t __attribute__((may_alias, aligned(1))) Word;
typedef uint32_t __attribute__((may_alias, aligned(1))) HalfWord;
#define WORD(at) (*(const Word *)(at))
#define HALF_WORD(at) (*(const HalfWord *)(at))

static inline uint64_t folded(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t h) {
    h = (h ^ h >> 37) * MIX_1;
    return h ^ h >> 32;
}

static inline uint64_t old_avalanche(uint64_t h) { /* that of XXH64 */
    h = (h ^ h >> 33) * PRIME64_2;
    h = (h ^ h >> 29) * PRIME64_3;
    return h ^ h >> 32;
}

static inline uint64_t rotated(uint64_t h, int by) {
    return h << by | h >> (64 - by);
}

static inline uint64_t mixed(const uint8_t *x, const uint8_t *key) {
    return folded(WORD(x) ^ WORD(key), WORD(x + 8) ^ WORD(key + 8));
}

static uint64_t digest_up_to_16(const uint8_t *x, int64_t n) {
    if (n > 8) {
        uint64_t low = WORD(x) ^ (WORD(secret + 24) ^ WORD(secret + 32));
        uint64_t high = WORD(x + n - 8) ^ (WORD(secret + 40) ^ WORD(secret + 48));
        return avalanche((uint64_t)n + __builtin_bswap64(low) + high + folded(low, high));
    }
    if (n >= 4) {
        uint64_t h = (HALF_WORD(x + n - 4) + ((uint64_t)HALF_WORD(x) << 32)) ^ (WORD(secret + 8) ^ WORD(secret + 16));
        h ^= rotated(h, 49) ^ rotated(h, 24);
        h *= MIX_2;
        h ^= (h >> 35) + (uint64_t)n;
        h *= MIX_2;
        return h ^ h >> 28;
    }
    if (n == 0)
        return old_avalanche(WORD(secret + 56) ^ WORD(secret + 64));
    uint32_t all = (uint32_t)x[0] << 16 | (uint32_t)x[n >> 1] << 24 | x[n - 1] | (uint32_t)n << 8;
    return old_avalanche(all ^ (uint64_t)(HALF_WORD(secret) ^ HALF_WORD(secret + 4)));
}

static uint64_t digest_up_to_240(const uint8_t *x, int64_t n) {
    uint64_t h = (uint64_t)n * PRIME64_1;
    if (n <= 128) {
        for (int64_t i = (n - 1) / 32; i >= 0; i--)
            h += mixed(x + 16 * i, secret + 32 * i) + mixed(x + n - 16 * (i + 1), secret + 32 * i + 16);
        return avalanche(h);
    }
    for (int i = 0; i < 8; i++)
        h += mixed(x + 16 * i, secret + 16 * i);
    h = avalanche(h);
    for (int i = 8; i < n / 16; i++)
        h += mixed(x + 16 * i, secret + 16 * (i - 8) + 3);
    return avalanche(h + mixed(x + n - 16, secret + 136 - 17));
}

static const uint64_t lanes_at_first[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

static inline void add_stripe(uint64_t *lanes, const uint8_t *x, const uint8_t *key) {
    uint64_t data[8], mix[8];
    for (int i = 0; i < 8; i++)
        data[i] = WORD(x + 8 * i), mix[i] = data[i] ^ WORD(key + 8 * i);
    for (int i = 0; i < 8; i++)
        lanes[i] += data[i ^ 1] + (mix[i] & 0xffffffffu) * (mix[i] >> 32);
}

/* Add chunks of memory to the lanes, and ask for the memory that is `ahead` of each stripe, so that it has come when it is needed. */
static void chunks_plain(uint64_t *lanes, const uint8_t *x, int64_t chunks, int64_t ahead) {
    for (; chunks > 0; chunks--, x += CHUNK) {
        for (int s = 0; s < STRIPES; s++) {
            __builtin_prefetch(x + STRIPE * s + ahead);
            add_stripe(lanes, x + STRIPE * s, secret + 8 * s);
        }
        for (int i = 0; i < 8; i++)
            lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ WORD(secret + SECRET - STRIPE + 8 * i)) * PRIME32_1;
    }
}

#if defined(__x86_64__)
/* The same in registers of `width` bytes. No compiler finds the multiplication of halves by itself. */
#define CHUNKS(set, width, type, load, store, with)                                                                   \
    with static void chunks_##set(uint64_t *to, const uint8_t *x, int64_t chunks, int64_t ahead) {                    \
        enum { REGISTERS = STRIPE / width };                                                                          \
        type lanes[REGISTERS], prime = _mm##width##_SET(PRIME32_1);                                                   \
        for (int r = 0; r < REGISTERS; r++)                                                                           \
            lanes[r] = load((const void *)(to + width / 8 * r));                                                      \
        for (; chunks > 0; chunks--, x += CHUNK) {                                                                    \
            _Pragma("GCC unroll 16") for (int s = 0; s < STRIPES; s++) {                                              \
                __builtin_prefetch(x + STRIPE * s + ahead);                                                           \
                for (int r = 0; r < REGISTERS; r++) {                                                                 \
                    type data = load((const void *)(x + STRIPE * s + width * r));                                     \
                    type mix = _mm##width##_XOR(data, load((const void *)(secret + 8 * s + width * r)));              \
                    type product = _mm##width##_MUL(mix, _mm##width##_SHR(mix, 32));                                  \
                    lanes[r] = _mm##width##_ADD(lanes[r], _mm##width##_ADD(product, _mm##width##_SWAP(data)));        \
                    __asm__("" : "+x"(lanes[r])); /* else gcc adds all 16 at the end, which takes more registers than there are */ \
                }                                                                                                     \
            }                                                                                                         \
            for (int r = 0; r < REGISTERS; r++) {                                                                     \
                type key = load((const void *)(secret + SECRET - STRIPE + width * r));                                \
                type mix = _mm##width##_XOR(_mm##width##_XOR(lanes[r], _mm##width##_SHR(lanes[r], 47)), key);         \
                type high = _mm##width##_MUL(_mm##width##_SHR(mix, 32), prime);                                       \
                lanes[r] = _mm##width##_ADD(_mm##width##_MUL(mix, prime), _mm##width##_SHL(high, 32));                \
            }                                                                                                         \
        }                                                                                                             \
        for (int r = 0; r < REGISTERS; r++)                                                                           \
            store((void *)(to + width / 8 * r), lanes[r]);                                                            \
    }

#define _mm32_SET(x) _mm256_set1_epi64x((int64_t)(x))
#define _mm32_XOR _mm256_xor_si256
#define _mm32_ADD _mm256_add_epi64
#define _mm32_MUL _mm256_mul_epu32
#define _mm32_SHR _mm256_srli_epi64
#define _mm32_SHL _mm256_slli_epi64
#define _mm32_SWAP(x) _mm256_shuffle_epi32(x, 0x4e)
#define _mm64_SET(x) _mm512_set1_epi64((int64_t)(x))
#define _mm64_XOR _mm512_xor_si512
#define _mm64_ADD _mm512_add_epi64
#define _mm64_MUL _mm512_mul_epu32
#define _mm64_SHR _mm512_srli_epi64
#define _mm64_SHL _mm512_slli_epi64
#define _mm64_SWAP(x) _mm512_shuffle_epi32(x, 0x4e)

CHUNKS(avx2, 32, __m256i, _mm256_loadu_si256, _mm256_storeu_si256, __attribute__((target("avx2"))))
CHUNKS(avx512, 64, __m512i, _mm512_loadu_si512, _mm512_storeu_si512, __attribute__((target("avx512f"))))
#endif

static void add_chunks(uint64_t *lanes, const uint8_t *x, int64_t chunks, int64_t ahead, int level) {
#if defined(__x86_64__)
    if (level) {
        (level == 2 ? chunks_avx512 : chunks_avx2)(lanes, x, chunks, ahead);
        return;
    }
#endif
    (void)level;
    chunks_plain(lanes, x, chunks, ahead);
}

/* Finish the digest of n bytes, more than 240, of which all whole chunks but one at the very end are in `lanes`. */
static uint64_t finished(uint64_t *lanes, const uint8_t *x, int64_t n) {
    int64_t done = (n - 1) / CHUNK * CHUNK, stripes = (n - 1 - done) / STRIPE;
    for (int64_t s = 0; s < stripes; s++)
        add_stripe(lanes, x + done + STRIPE * s, secret + 8 * s);
    add_stripe(lanes, x + n - STRIPE, secret + SECRET - STRIPE - 7);
    uint64_t h = (uint64_t)n * PRIME64_1;
    for (int i = 0; i < 4; i++)
        h += folded(lanes[2 * i] ^ WORD(secret + 11 + 16 * i), lanes[2 * i + 1] ^ WORD(secret + 19 + 16 * i));
    return avalanche(h);
}

/* Return the digest of n adjacent bytes. */
EXPORTED uint64_t hookd_digest(const uint8_t *x, int64_t n, int level) {
    if (n <= 16)
        return digest_up_to_16(x, n);
    if (n <= 240)
        return digest_up_to_240(x, n);
    uint64_t lanes[8];
    for (int i = 0; i < 8; i++)
        lanes[i] = lanes_at_first[i];
    add_chunks(lanes, x, (n - 1) / CHUNK, 0, level);
    return finished(lanes, x, n);
}

/* Return the digest of n adjacent elements, and the sums of `Extent.of_sums`, in one pass over the memory. */
EXPORTED uint64_t hookd_digest_extent(const uint8_t *x, int64_t n, int dtype, int level, double *to) {
    const Set *set = set_of(level);
    int64_t width = size_of(dtype), bytes = n * width, chunks = (bytes - 1) / CHUNK;
    uint64_t lanes[8];
    double out[FIELDS];
    for (int i = 0; i < 8; i++)
        lanes[i] = lanes_at_first[i];
    clear(out);
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t from = i * width / CHUNK, until = (i + BLOCK) * width / CHUNK;
        /* A request for memory behind the end would search for pages that are not there. */
        int64_t ahead = n - i > 2 * BLOCK ? BLOCK * width : 0;
        extent(set, x + i * width, (int)(n - i < BLOCK ? n - i : BLOCK), dtype, out);
        if (bytes > 240)
            add_chunks(lanes, x + i * width, (until < chunks ? until : chunks) - from, ahead, level);
    }
    to[0] = out[COUNT], to[1] = out[SQUARES], to[2] = out[MIN], to[3] = out[MAX];
    to[4] = out[NANS] + out[INFS] + out[NEGATIVE_INFS];
    return bytes > 240 ? finished(lanes, x, bytes) : hookd_digest(x, bytes, level);
}

static const uint64_t infinity[] = {0x7f800000u, 0x7ff0000000000000u, 0x7c00u, 0x7f80u}; /* by dtype */

typedef uint64_t (*Most)(const void *, int);

static Most most_of(const Set *set, int dtype) {
    int width = size_of(dtype);
    return width == 8 ? set->most_64 : width == 4 ? set->most_32 : set->most_16;
}

/* Check n adjacent elements. Return 0 if all are finite, 1 if only -inf is among the others, 2 for a NaN or +inf. */
EXPORTED int hookd_is_finite(const void *x, int64_t n, int dtype, int level) {
    int width = size_of(dtype), found = 0;
    Most most = most_of(set_of(level), dtype);
    int (*masked)(const void *, int, uint64_t) = width == 8 ? masked_64 : width == 4 ? masked_32 : masked_16;
    for (int64_t i = 0; i < n; i += BLOCK) {
        const char *at = (const char *)x + i * width;
        int m = (int)(n - i < BLOCK ? n - i : BLOCK);
        if (most(at, m) < infinity[dtype])
            continue;
        if (!masked(at, m, infinity[dtype]))
            return 2;
        found = 1;
    }
    return found;
}

/* Return the largest magnitude in several tensors, each with n adjacent elements; NaN if there is one. */
EXPORTED double hookd_largest(const void *const *x, const int64_t *n, int tensors, int dtype, int level) {
    Most most = most_of(set_of(level), dtype);
    uint64_t largest = 0;
    for (int t = 0; t < tensors; t++)
        for (int64_t i = 0; i < n[t]; i += BLOCK) {
            uint64_t m = most((const char *)x[t] + i * size_of(dtype), (int)(n[t] - i < BLOCK ? n[t] - i : BLOCK));
            largest = m > largest ? m : largest;
        }
    union { uint64_t u; double f; } wide = {largest};
    uint16_t half = (uint16_t)largest;
    float narrow = from_bits((uint32_t)largest << (dtype == BF16 ? 16 : 0));
    if (dtype == F64)
        return wide.f;
    if (dtype == F16)
        half_plain(&half, 1, &narrow);
    return narrow;
}
