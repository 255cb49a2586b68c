/* The two lanes of the content digest of rows in memory, in one pass: what kvcore/digest.py defines. */

#include <stdint.h>

typedef uint32_t word_at_any_byte __attribute__((aligned(1), may_alias));

#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__)
#define FOR_ITS_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_ITS_VECTORS
#endif

#define STEP(value, shift, factor) (((value) ^ ((value) >> (shift))) * (uint32_t)(factor))

/* Row c of request q begins at base + q * apart + offsets[c], and is at positions[q * columns + c]: none if negative. */
FOR_ITS_VECTORS
void kvcore_lanes(const unsigned char *base, int64_t apart, const int64_t *offsets, const int64_t *positions,
                  int64_t requests, int64_t columns, int64_t words, uint32_t salt, uint32_t *lanes)
{
    for (int64_t request = 0; request < requests; request++, base += apart, positions += columns, lanes += 2) {
        uint32_t first = 0, second = 0;
        for (int64_t column = 0; column < columns; column++) {
            if (positions[column] < 0)
                continue;
            const word_at_any_byte *stored = (const word_at_any_byte *)(base + offsets[column]);
            const uint32_t place = salt + (uint32_t)positions[column] * 0x7FEB352Du;
            for (uint32_t number = 0; number < (uint32_t)words; number++) {
                const uint32_t key = place + number * 0x9E3779B1u, word = stored[number];
                /* The last step of a key and the first of a word are the same shift: see kvcore/digest.py. */
                const uint32_t shared = word ^ (word >> 16);
                uint32_t one = key + 0x2545F491u, other = key + 0x9E6C63D0u;
                one = STEP(STEP(one, 16, 0x85EBCA6Bu), 13, 0xC2B2AE35u) ^ shared;
                other = STEP(STEP(other, 16, 0x85EBCA6Bu), 13, 0xC2B2AE35u) ^ shared;
                one = STEP(one * 0x85EBCA6Bu, 13, 0xC2B2AE35u);
                other = STEP(other * 0x85EBCA6Bu, 13, 0xC2B2AE35u);
                first += one ^ (one >> 16);
                second += other ^ (other >> 16);
            }
        }
        lanes[0] += first;
        lanes[1] += second;
    }
}
