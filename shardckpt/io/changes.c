/* Compares chunks with those of an earlier version.

This file knows no Python, allocates nothing and reaches no file: moving_binding.c checks all
arguments. It uses functions of moving.c. Memory is accessed by memcpy, so that nothing need be
aligned. */

#include <stdint.h>
#include <string.h>

enum {
    LONG_GAP = 255,
    PORTION = 6 * STREAM,
    AHEAD = 2 << 10 /* bytes of the old elements that are fetched ahead */
};

/* The result of one chunk's comparison; numpy reads it as three 64-bit numbers. */
struct comparison {
    int64_t changed;   /* elements that differ */
    int64_t long_gaps; /* gaps between them of at least LONG_GAP elements */
    int64_t crc;       /* crc32c of the new elements */
};

/* Bytes that a comparison needs at `out`, of so many elements of so many bytes. */
static int64_t room_for_changes(int64_t elements, int64_t itemsize) {
    return elements * (1 + itemsize) + 4 * (elements / (LONG_GAP + 1) + 1);
}

/* Which of 64 bytes differ: bit k for byte k. */
#if defined(__x86_64__) && !defined(WITHOUT_SSE) /* a test builds without */
#include <emmintrin.h>
INLINED uint64_t differing(const char *a, const char *b) {
    uint64_t equal = 0;
    for (int k = 0; k < 64; k += 16) {
        const __m128i one = _mm_loadu_si128((const __m128i *)(a + k)),
                      other = _mm_loadu_si128((const __m128i *)(b + k));
        equal |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(one, other)) << k;
    }
    return ~equal;
}
#else
INLINED uint64_t differing(const char *a, const char *b) {
    uint64_t mask = 0;
    for (int k = 0; k < 64; k += 8) {
        const uint64_t word = load(a + k, 8) ^ load(b + k, 8), low = UINT64_C(0x7f7f7f7f7f7f7f7f);
        /* The highest bit of each byte that is not zero. */
        const uint64_t set = (((word & low) + low) | word) & ~low;
        mask |= ((set >> 7) * UINT64_C(0x0102040810204080) >> 56) << k; /* these bits together */
    }
    return mask;
}
#endif

/* What is written of one chunk. */
struct writer {
    uint8_t *gaps;
    char *longs, *planes;
    int64_t plane; /* bytes from one byte of an element to the next one */
    int64_t last;  /* the last element that differs */
};

INLINED void add(const char *old, const char *new, int64_t i, int size, struct writer *w,
                 struct comparison *f) {
    const uint64_t growth = load(new, size) - load(old, size);
    /* The sign becomes the lowest bit. */
    const uint64_t folded = growth << 1 ^ (growth >> (8 * size - 1) & 1 ? ~UINT64_C(0) : 0);
    const int64_t gap = i - w->last - 1;
    if (gap >= LONG_GAP) {
        const uint32_t rest = (uint32_t)(gap - LONG_GAP);
        memcpy(w->longs + 4 * f->long_gaps++, &rest, 4);
    }
    w->gaps[f->changed] = (uint8_t)(gap < LONG_GAP ? gap : LONG_GAP);
    for (int k = 0; k < size; k++)
        w->planes[k * w->plane + f->changed] = (char)(folded >> 8 * k);
    f->changed++;
    w->last = i;
}

/* Compare a portion of a chunk, `n` elements from number `first` on, 64 bytes at a time. The
   elements that differ are listed first: of most of these 64 bytes none does or one, and a branch
   between the two would be mispredicted half of the time. */
INLINED void compare(char *old, const char *new, int64_t first, int64_t n, int size,
                     struct writer *w, struct comparison *f) {
    uint16_t list[PORTION];
    int64_t i = 0, listed = 0;
    for (; i + 64 / size <= n; i += 64 / size) {
        __builtin_prefetch(old + i * size + AHEAD);
        uint64_t differ = differing(new + i * size, old + i * size);
        for (int k = 1; k < size; k *= 2) /* to the lowest bit of each element */
            differ |= differ >> k;
        differ &= UINT64_MAX / (UINT64_MAX >> (64 - size));
        do { /* what is written for none is written over */
            list[listed] = (uint16_t)(i + __builtin_ctzll(differ | UINT64_C(1) << 63) / size);
            listed += differ != 0;
        } while (differ &= differ - 1);
    }
    for (; i < n; i++) {
        list[listed] = (uint16_t)i;
        listed += load(new + i * size, size) != load(old + i * size, size);
    }
    for (int64_t k = 0; k < listed; k++) {
        add(old + list[k] * size, new + list[k] * size, first + list[k], size, w, f);
        memcpy(old + list[k] * size, new + list[k] * size, (size_t)size);
    }
}

/* The elements of a chunk: a box of any strides, the dimensions from the outermost. */
struct box {
    const char *data;
    int ndim;
    int64_t shape[MOST_DIMS], step[MOST_DIMS];
};

/* Write gaps, long gaps and planes of the growth of a chunk's elements to `out`
   (shardckpt/format/differences.py has the form). The new elements are copied to a small buffer
   portion by portion. Each portion is compared and summed while it is in the cache. The old
   elements become the new ones. `size`: bytes of an element, 1, 2, 4 or 8. */
static struct comparison changes(char *old, const struct box *new, int64_t n, int size, char *out) {
    struct comparison f = {0, 0, 0};
    char *longs = out + n, portion[PORTION];
    struct writer w = {(uint8_t *)out, longs, longs + 4 * (n / (LONG_GAP + 1) + 1), n, -1};
    struct slabs s;
    uint32_t crc = 0;
    int64_t first = 0;
    if (n > 0) {
        cut(&s, new->shape, new->ndim, size, PORTION);
        do {
            crc = slab_out(&s, portion, (char *)new->data, new->shape, new->step, size, crc);
            const int64_t count = s.nbytes / size;
            char *const at = old + first * size;
            if (size == 1)
                compare(at, portion, first, count, 1, &w, &f);
            else if (size == 2)
                compare(at, portion, first, count, 2, &w, &f);
            else if (size == 4)
                compare(at, portion, first, count, 4, &w, &f);
            else
                compare(at, portion, first, count, 8, &w, &f);
            first += count;
        } while (next_slab(&s));
    }
    f.crc = crc;
    /* The lists move together. */
    memmove(out + f.changed, w.longs, (size_t)(4 * f.long_gaps));
    for (int k = 0; k < size; k++)
        memmove(out + f.changed + 4 * f.long_gaps + k * f.changed, w.planes + k * n,
                (size_t)f.changed);
    return f;
}
