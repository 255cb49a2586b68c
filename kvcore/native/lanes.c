/* The two lanes of the content digest of rows in memory, in one pass: what kvcore/digest.py defines. */

#include <stdint.h>

typedef uint32_t word_at_any_byte __attribute__((aligned(1), may_alias));

#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__)
#define FOR_ITS_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_ITS_VECTORS
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define STEP(value, shift, factor) (((value) ^ ((value) >> (shift))) * (uint32_t)(factor))

/* Many rows, in the order of kvcore.digest.Rows. */
struct rows {
    const unsigned char *base;
    int64_t apart;
    const int64_t *offsets, *positions;
    int64_t requests, columns, nbytes, salt;
    uint32_t *lanes;
};

ALWAYS_INLINE void add_word(uint32_t key, uint32_t word, uint32_t *first, uint32_t *second)
{
    /* The last step of a key and the first of a word are the same shift: see kvcore/digest.py. */
    const uint32_t shared = word ^ (word >> 16);
    uint32_t one = key + 0x2545F491u, other = key + 0x9E6C63D0u;
    one = STEP(STEP(one, 16, 0x85EBCA6Bu), 13, 0xC2B2AE35u) ^ shared;
    other = STEP(STEP(other, 16, 0x85EBCA6Bu), 13, 0xC2B2AE35u) ^ shared;
    one = STEP(one * 0x85EBCA6Bu, 13, 0xC2B2AE35u);
    other = STEP(other * 0x85EBCA6Bu, 13, 0xC2B2AE35u);
    *first += one ^ (one >> 16);
    *second += other ^ (other >> 16);
}

ALWAYS_INLINE void add_lanes(const struct rows *of)
{
    const unsigned char *base = of->base;
    const int64_t *offsets = of->offsets, *positions = of->positions, columns = of->columns;
    const uint32_t words = (uint32_t)(of->nbytes / 4), rest = (uint32_t)(of->nbytes % 4), salt = (uint32_t)of->salt;
    uint32_t *lanes = of->lanes;
    /* Row c of request q begins at base + q * apart + offsets[c], at positions[q * columns + c]: none if negative. */
    for (int64_t request = 0; request < of->requests; request++, base += of->apart, positions += columns, lanes += 2) {
        uint32_t first = 0, second = 0;
        for (int64_t column = 0; column < columns; column++) {
            if (positions[column] < 0)
                continue;
            const unsigned char *row = base + offsets[column];
            const word_at_any_byte *stored = (const word_at_any_byte *)row;
            const uint32_t place = salt + (uint32_t)positions[column] * 0x7FEB352Du;
            for (uint32_t number = 0; number < words; number++)
                add_word(place + number * 0x9E3779B1u, stored[number], &first, &second);
            if (rest) {
                uint32_t last = 0;
                for (uint32_t byte = 0; byte < rest; byte++)
                    last |= (uint32_t)row[4 * words + byte] << (8 * byte);
                add_word(place + words * 0x9E3779B1u, last, &first, &second);
            }
        }
        lanes[0] += first;
        lanes[1] += second;
    }
}

FOR_ITS_VECTORS
void kvcore_lanes(const struct rows *all, int64_t count)
{
    for (int64_t number = 0; number < count; number++)
        add_lanes(all + number);
}
