/* Moves boxes of elements between memory and the chunks of a file, with the checksum of each chunk
in the same pass.

A chunk in a file is its elements, row-major and padded with zeros at an array's edge, and then
their crc32c (4 bytes, little-endian). In memory a chunk is a box of an array of up to MOST_DIMS
dimensions and of any strides.

1. A chunk is cut into slabs: parts that are boxes and whose elements follow one another in the
   chunk. A slab has room in the scratch, which stays in the processor's cache.
2. Writing copies slabs to the scratch, adds them to the checksum, and writes the scratch when it
   is full.
3. Reading fills the scratch from the file, checks a slab and copies its rows to their places. A
   large chunk whose elements follow one another in its one place is read there directly.

This file knows no Python: tests run it under sanitizers. All arguments have been checked by its
caller. It allocates nothing, starts no thread, and reaches the kernel through `moving_calls` alone,
which tests replace. Memory is accessed by memcpy, so that nothing need be aligned. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* sync_file_range */
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_DIMS = 8,
    CHECKSUM_BYTES = 4,
    DIRECT_BYTES = 64 << 10,
    PORTION_BYTES = 1 << 20,
    WRITE_BACK_BYTES = 8 << 20
};

/* All functions that concern a file. The last is a hint that a disk may begin to write. */
struct moving_calls {
    ssize_t (*pwrite)(int, const void *, size_t, off_t);
    ssize_t (*preadv)(int, const struct iovec *, int, off_t);
    int (*sync_file_range)(int, off_t, off_t, unsigned);
};
__attribute__((visibility("default"))) struct moving_calls moving_calls = {pwrite, preadv,
                                                                           sync_file_range};

/* What ended a call; of a failure, `done` is the chunk that it concerns. */
enum { MOVED, WRONG_CHECKSUM, END_OF_FILE, SYSTEM_ERROR, STOPPED };

struct progress {
    int64_t done;  /* chunks that are complete */
    int64_t until; /* nanoseconds of the monotonic clock after which no further chunk is begun */
    int (*interrupted)(void *); /* called after a signal: whether the call ends as STOPPED */
    void *context;
    int error; /* errno of a SYSTEM_ERROR */
};

/* So that the size of an element is a constant. */
#define INLINED __attribute__((always_inline)) static inline

/* A number of `size` bytes, 1, 2, 4 or 8, little-endian. */
INLINED uint64_t load(const void *at, int size) {
    uint64_t value = 0;
    memcpy(&value, at, (size_t)size);
    return value;
}

/* ---- crc32c (polynomial 0x1EDC6F41, reflected) */

enum { STREAM = 2 << 10, COPIED_STREAM = 8 << 10 }; /* stores to close streams hinder each other */

static uint32_t crc_of_byte[256];
static uint32_t crc_after_stream[4][256]; /* how a checksum changes over STREAM zero bytes */
static uint32_t (*crc_extend)(uint32_t, const uint8_t *, size_t);
static size_t (*copy_streams)(uint32_t *, uint8_t *, const uint8_t *, size_t); /* NULL: none */

static uint32_t crc_by_table(uint32_t crc, const uint8_t *at, size_t n) {
    for (; n; n--, at++)
        crc = crc_of_byte[(crc ^ *at) & 255] ^ crc >> 8;
    return crc;
}

static uint32_t after_zeros(uint32_t crc, size_t n) {
    for (; n; n -= STREAM)
        crc = crc_after_stream[0][crc & 255] ^ crc_after_stream[1][crc >> 8 & 255] ^
              crc_after_stream[2][crc >> 16 & 255] ^ crc_after_stream[3][crc >> 24];
    return crc;
}

#if defined(__x86_64__)
#include <nmmintrin.h>
#define CRC_INSTRUCTION __attribute__((target("sse4.2")))
#define CRC_8(crc, word) ((uint32_t)_mm_crc32_u64(crc, word))
#define CRC_1(crc, byte) _mm_crc32_u8(crc, byte)
static int has_crc_instruction(void) { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define CRC_INSTRUCTION __attribute__((target("+crc")))
#define CRC_8(crc, word) __crc32cd(crc, word)
#define CRC_1(crc, byte) __crc32cb(crc, byte)
/* HWCAP_CRC32 */
static int has_crc_instruction(void) { return (getauxval(AT_HWCAP) >> 7 & 1) != 0; }
#endif

#ifdef CRC_INSTRUCTION
/* The instruction takes three cycles and one can begin in each: so three streams are summed at a
   time, and joined. They are copied on the way if there is a place, so that what is summed is what
   is there even if the elements change meanwhile. Returns the bytes of all complete streams. */
CRC_INSTRUCTION INLINED size_t add_streams(uint32_t *crc, uint8_t *to, const uint8_t *at, size_t n,
                                           size_t stream) {
    size_t done = 0;
    for (; n - done >= 3 * stream; done += 3 * stream) {
        uint32_t first = *crc, second = 0, third = 0;
        for (size_t i = done; i < done + stream; i += 8) {
            const uint64_t a = load(at + i, 8), b = load(at + stream + i, 8),
                           c = load(at + 2 * stream + i, 8);
            first = CRC_8(first, a);
            second = CRC_8(second, b);
            third = CRC_8(third, c);
            if (to) {
                memcpy(to + i, &a, 8);
                memcpy(to + stream + i, &b, 8);
                memcpy(to + 2 * stream + i, &c, 8);
            }
        }
        *crc = after_zeros(after_zeros(first, stream) ^ second, stream) ^ third;
    }
    return done;
}

CRC_INSTRUCTION static size_t copy_by_instruction(uint32_t *crc, uint8_t *to, const uint8_t *at,
                                                  size_t n) {
    return add_streams(crc, to, at, n, COPIED_STREAM);
}

CRC_INSTRUCTION static uint32_t crc_by_instruction(uint32_t crc, const uint8_t *at, size_t n) {
    size_t i = add_streams(&crc, NULL, at, n, STREAM);
    for (; n - i >= 8; i += 8)
        crc = CRC_8(crc, load(at + i, 8));
    for (; i < n; i++)
        crc = CRC_1(crc, at[i]);
    return crc;
}
#endif

/* Call once before anything else; `plain`: do without the processor's instruction. */
static void moving_begin(int plain) {
    static const uint8_t zeros[STREAM];
    for (uint32_t value = 0; value < 256; value++) {
        crc_of_byte[value] = value;
        for (int bit = 0; bit < 8; bit++)
            crc_of_byte[value] =
                crc_of_byte[value] >> 1 ^ (crc_of_byte[value] & 1 ? 0x82f63b78u : 0);
    }
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t value = 0; value < 256; value++)
            crc_after_stream[byte][value] = crc_by_table(value << 8 * byte, zeros, STREAM);
    crc_extend = crc_by_table;
#ifdef CRC_INSTRUCTION
    if (!plain && has_crc_instruction()) {
        crc_extend = crc_by_instruction;
        copy_streams = copy_by_instruction;
    }
#else
    (void)plain;
#endif
}

/* The checksum of some bytes and of those before them, whose checksum is `crc` (0: none). */
static uint32_t crc32c(uint32_t crc, const char *at, int64_t n) {
    return ~crc_extend(~crc, (const uint8_t *)at, (size_t)n);
}

/* The same of bytes that are copied: that takes as long as copying them. */
static uint32_t copy_summed(uint32_t crc, char *to, const char *from, int64_t n) {
    uint32_t sum = ~crc;
    const int64_t done = copy_streams ? (int64_t)copy_streams(&sum, (uint8_t *)to,
                                                              (const uint8_t *)from, (size_t)n)
                                      : 0;
    memcpy(to + done, from + done, (size_t)(n - done));
    return crc32c(~sum, to + done, n - done);
}

static void store_crc(uint32_t crc, char *to) {
    for (int i = 0; i < CHECKSUM_BYTES; i++)
        to[i] = (char)(crc >> 8 * i & 255);
}

/* ---- boxes of elements */

static void copy_row(char *to, int64_t to_step, const char *from, int64_t from_step, int64_t n,
                     int64_t itemsize) {
#define ONE_BY_ONE(size)                                                                           \
    case size:                                                                                     \
        for (; n; n--, to += to_step, from += from_step)                                           \
            memcpy(to, from, size);                                                                \
        return;
    switch (itemsize) {
        ONE_BY_ONE(1)
        ONE_BY_ONE(2)
        ONE_BY_ONE(4)
        ONE_BY_ONE(8)
        ONE_BY_ONE(16)
    default:
        for (; n; n--, to += to_step, from += from_step)
            memcpy(to, from, (size_t)itemsize);
    }
#undef ONE_BY_ONE
}

/* Copy a box of elements; steps are in bytes. */
static void copy_box(char *to, const int64_t *to_step, const char *from, const int64_t *from_step,
                     const int64_t *shape, int ndim, int64_t itemsize) {
    /* Dimensions from the innermost, which follow one another in both places joined; the first
       "dimension" is an element. */
    int64_t n[MOST_DIMS + 1] = {itemsize}, at[MOST_DIMS + 1] = {0};
    int64_t a[MOST_DIMS + 1] = {1}, b[MOST_DIMS + 1] = {1};
    int dims = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        if (shape[d] == 0)
            return;
        if (shape[d] == 1)
            continue;
        const int last = dims - 1;
        if (to_step[d] == n[last] * a[last] && from_step[d] == n[last] * b[last]) {
            n[last] *= shape[d];
            continue;
        }
        n[dims] = shape[d];
        a[dims] = to_step[d];
        b[dims++] = from_step[d];
    }
    /* Elements that lie apart are copied one by one along the innermost dimension, joined ones as
       rows. */
    const int single = dims > 1 && n[0] == itemsize;
    for (;;) {
        if (single)
            copy_row(to, a[1], from, b[1], n[1], itemsize);
        else
            memcpy(to, from, (size_t)n[0]);
        int d = single ? 2 : 1;
        for (; d < dims; d++) {
            to += a[d];
            from += b[d];
            if (++at[d] < n[d])
                break;
            to -= n[d] * a[d];
            from -= n[d] * b[d];
            at[d] = 0;
        }
        if (d >= dims)
            return;
    }
}

static const int64_t corner[MOST_DIMS]; /* of a chunk: zeros */

/* The slabs of a chunk, one after another. */
struct slabs {
    int ndim, axis; /* the dimension that is cut; -1: none is */
    const int64_t *chunk;
    int64_t step[MOST_DIMS]; /* bytes from an element of the chunk to the next one */
    int64_t rows;            /* most indices of `axis` in a slab */
    int64_t start[MOST_DIMS], size[MOST_DIMS]; /* the present slab */
    int64_t nbytes;
};

/* Begin with the first slab of a chunk. */
static void first_slab(struct slabs *s) {
    for (int d = 0; d < s->ndim; d++) {
        s->start[d] = 0;
        s->size[d] = d < s->axis ? 1 : s->chunk[d];
    }
    if (s->axis >= 0 && s->size[s->axis] > s->rows)
        s->size[s->axis] = s->rows;
    s->nbytes = s->axis >= 0 ? s->size[s->axis] * s->step[s->axis] : s->nbytes;
}

/* Cut chunks of a shape into slabs of at most `room` bytes. */
static void cut(struct slabs *s, const int64_t *chunk, int ndim, int64_t itemsize, int64_t room) {
    int64_t inner = itemsize;
    s->ndim = ndim;
    s->chunk = chunk;
    s->axis = -1;
    for (int d = ndim - 1; d >= 0; d--) {
        s->step[d] = inner;
        if (s->axis < 0 && inner <= room / chunk[d])
            s->nbytes = inner * chunk[d];
        else if (s->axis < 0) {
            s->axis = d;
            s->rows = room / inner;
        }
        inner *= chunk[d];
    }
    if (ndim == 0)
        s->nbytes = itemsize;
    first_slab(s);
}

/* Go to the next slab; 0 after the last one. */
static int next_slab(struct slabs *s) {
    if (s->axis < 0)
        return 0;
    s->start[s->axis] += s->size[s->axis];
    for (int d = s->axis; s->start[d] == s->chunk[d]; d--) {
        if (d == 0)
            return 0;
        s->start[d] = 0;
        s->start[d - 1]++;
    }
    const int64_t left = s->chunk[s->axis] - s->start[s->axis];
    s->size[s->axis] = left < s->rows ? left : s->rows;
    s->nbytes = s->size[s->axis] * s->step[s->axis];
    return 1;
}

/* Copy what a slab and a box of its chunk have in common, from the slab (`out`: to it). */
static void copy_common(const struct slabs *s, char *slab, char *box, const int64_t *start,
                        const int64_t *shape, const int64_t *step, int64_t itemsize, int out) {
    int64_t common[MOST_DIMS];
    for (int d = 0; d < s->ndim; d++) {
        const int64_t first = s->start[d] > start[d] ? s->start[d] : start[d];
        const int64_t s_end = s->start[d] + s->size[d], b_end = start[d] + shape[d];
        common[d] = (s_end < b_end ? s_end : b_end) - first;
        if (common[d] <= 0)
            return;
        slab += (first - s->start[d]) * s->step[d];
        box += (first - start[d]) * step[d];
    }
    if (out)
        copy_box(slab, s->step, box, step, common, s->ndim, itemsize);
    else
        copy_box(box, step, slab, s->step, common, s->ndim, itemsize);
}

/* ---- the file */

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Whether a system call that failed is made again. */
static int again(struct progress *p, int *how) {
    p->error = errno;
    *how = p->error == EINTR ? STOPPED : SYSTEM_ERROR;
    return p->error == EINTR && !(p->interrupted && p->interrupted(p->context));
}

static int write_all(int fd, const char *data, int64_t n, int64_t offset, struct progress *p) {
    while (n && fd >= 0) {
        const ssize_t wrote = moving_calls.pwrite(fd, data, (size_t)n, (off_t)offset);
        int how;
        if (wrote < 0 && again(p, &how))
            continue;
        if (wrote < 0)
            return how;
        if (wrote == 0) { /* a file system that accepts nothing and says no reason: not forever */
            p->error = EIO;
            return SYSTEM_ERROR;
        }
        data += wrote;
        offset += wrote;
        n -= wrote;
    }
    return MOVED;
}

/* Fill one buffer, and then another one (`more` bytes), from consecutive bytes of a file. */
static int read_all(int fd, char *into, int64_t n, char *then, int64_t more, int64_t offset,
                    struct progress *p) {
    while (n + more) {
        const struct iovec parts[2] = {{into, (size_t)n}, {then, (size_t)more}};
        const ssize_t got = n ? moving_calls.preadv(fd, parts, more ? 2 : 1, (off_t)offset)
                              : moving_calls.preadv(fd, parts + 1, 1, (off_t)offset);
        int how;
        if (got < 0 && again(p, &how))
            continue;
        if (got < 0)
            return how;
        if (got == 0)
            return END_OF_FILE;
        const int64_t first = got < n ? got : n;
        into += first;
        n -= first;
        then += got - first;
        more -= got - first;
        offset += got;
    }
    return MOVED;
}

/* Copy a slab of a chunk from the box of its elements, and add it to the chunk's checksum. */
static uint32_t slab_out(const struct slabs *s, char *slab, char *box, const int64_t *shape,
                         const int64_t *step, int64_t itemsize, uint32_t crc) {
    const char *from = box;
    int joined = 1;
    for (int d = 0; d < s->ndim; d++) {
        joined &= s->start[d] + s->size[d] <= shape[d] &&
                  (s->size[d] == 1 || step[d] == s->step[d]);
        from += s->start[d] * step[d];
    }
    if (joined)
        return copy_summed(crc, slab, from, s->nbytes);
    copy_common(s, slab, box, corner, shape, step, itemsize, 1);
    return crc32c(crc, slab, s->nbytes);
}

/* ---- writing */

struct block {
    char *data;
    int64_t step[MOST_DIMS];
};

/* Blocks of one shape, each cut into chunks of one shape: chunks `first` to `last` of all of them
   go to a file one after another. */
struct writing {
    int fd, ndim; /* fd < 0: no file; the scratch has room for all chunks, which stay there */
    int64_t offset, itemsize;
    int64_t begun; /* offset up to which the disk has begun to write the file */
    int64_t shape[MOST_DIMS], chunk[MOST_DIMS];
    const struct block *blocks;
    int64_t first, last;
    char *crcs; /* 4 bytes for each of these chunks */
    char *scratch;
    int64_t room; /* bytes of the scratch: at least those of an element and of a checksum */
};

static int move_out(const struct writing *w, struct progress *p) {
    int64_t grid[MOST_DIMS], each = 1, filled = 0, offset = w->offset;
    struct slabs s;
    int how;
    for (int d = 0; d < w->ndim; d++) {
        grid[d] = (w->shape[d] - 1) / w->chunk[d] + 1; /* as the binding, without an overflow */
        each *= grid[d];
    }
    cut(&s, w->chunk, w->ndim, w->itemsize, w->room);
    int64_t number = w->first;
    do {
        const struct block *block = &w->blocks[number / each];
        char *box = block->data;
        int64_t position = number % each, shape[MOST_DIMS];
        int cut_off = 0;
        for (int d = w->ndim - 1; d >= 0; d--) {
            const int64_t at = position % grid[d] * w->chunk[d], left = w->shape[d] - at;
            position /= grid[d];
            box += at * block->step[d];
            shape[d] = left < w->chunk[d] ? left : w->chunk[d];
            cut_off |= shape[d] < w->chunk[d];
        }
        uint32_t crc = 0;
        first_slab(&s);
        do {
            if (w->room - filled < s.nbytes) {
                if ((how = write_all(w->fd, w->scratch, filled, offset, p)) != MOVED)
                    return how;
                offset += filled;
                filled = 0;
            }
            char *slab = w->scratch + filled;
            if (cut_off)
                memset(slab, 0, (size_t)s.nbytes);
            crc = slab_out(&s, slab, box, shape, block->step, w->itemsize, crc);
            filled += s.nbytes;
        } while (next_slab(&s));
        if (w->room - filled < CHECKSUM_BYTES) {
            if ((how = write_all(w->fd, w->scratch, filled, offset, p)) != MOVED)
                return how;
            offset += filled;
            filled = 0;
        }
        store_crc(crc, w->scratch + filled);
        store_crc(crc, w->crcs + (number - w->first) * CHECKSUM_BYTES);
        filled += CHECKSUM_BYTES;
        number++;
    } while (number < w->last && now() < p->until);
    if ((how = write_all(w->fd, w->scratch, filled, offset, p)) != MOVED)
        return how;
    p->done = number - w->first;
    const int64_t ready = offset + filled - w->begun;
    if (w->fd >= 0 && ready >= WRITE_BACK_BYTES) /* it reports no error: `fsync` does */
        moving_calls.sync_file_range(w->fd, (off_t)w->begun, (off_t)ready, SYNC_FILE_RANGE_WRITE);
    return MOVED;
}

/* ---- reading */

/* Where a part of each chunk of a band goes. */
struct place {
    char *data;                                 /* of the first chunk's part */
    int64_t next;                               /* bytes to the next chunk's */
    int64_t start[MOST_DIMS], shape[MOST_DIMS]; /* the part of the chunk */
    int64_t step[MOST_DIMS];
};

/* Chunks of one shape that follow one another in the file, and in each of their places. */
struct band {
    int64_t offset, count, itemsize, nbytes; /* bytes of a chunk's elements */
    int64_t chunk[MOST_DIMS];
    int ndim, places;
    const struct place *place;
};

/* The bytes of a file that are in the scratch. */
struct window {
    int fd;
    char *scratch;
    int64_t room, begin, end;
};

/* Bring the next `n` bytes to the scratch, with those after them, up to `stop`, for which there is
   room; sets `found`. */
static int look(struct window *w, int64_t offset, int64_t n, int64_t stop, char **found,
                struct progress *p) {
    if (offset < w->begin || offset > w->end)
        w->begin = w->end = offset;
    if (offset + n > w->end) {
        stop = stop < offset + n ? offset + n : stop;
        const int64_t kept = w->end - offset;
        memmove(w->scratch, w->scratch + (offset - w->begin), (size_t)kept);
        w->begin = offset;
        const int64_t most = stop - offset < w->room ? stop - offset : w->room;
        const int how = read_all(w->fd, w->scratch + kept, most - kept, w->scratch, 0, w->end, p);
        if (how == END_OF_FILE && most > n) /* perhaps a later chunk is cut off, and not this one */
            return look(w, offset, n, offset + n, found, p);
        if (how != MOVED)
            return how;
        w->end = offset + most;
    }
    *found = w->scratch + (offset - w->begin);
    return MOVED;
}

/* Whether a chunk's elements follow one another in its one place. */
static int is_direct(const struct band *b) {
    int64_t step = b->itemsize;
    if (b->nbytes < DIRECT_BYTES || b->places != 1)
        return 0;
    for (int d = b->ndim - 1; d >= 0; d--) {
        if (b->place->shape[d] != b->chunk[d] || (b->chunk[d] > 1 && b->place->step[d] != step))
            return 0;
        step *= b->chunk[d];
    }
    return 1;
}

static int has_crc(uint32_t crc, const char *stored, const char *expected) {
    char end[CHECKSUM_BYTES];
    store_crc(crc, end);
    return memcmp(end, stored, CHECKSUM_BYTES) == 0 && memcmp(end, expected, CHECKSUM_BYTES) == 0;
}

/* Read a chunk straight to its place, some at a time, so that the bytes are summed while the cache
   has them. */
static int read_direct(int fd, char *to, int64_t nbytes, int64_t offset, const char *expected,
                       struct progress *p) {
    uint32_t crc = 0;
    char end[CHECKSUM_BYTES];
    for (int64_t at = 0; at < nbytes;) {
        const int64_t n = nbytes - at < PORTION_BYTES + DIRECT_BYTES ? nbytes - at : PORTION_BYTES;
        const int how =
            read_all(fd, to + at, n, end, at + n == nbytes ? CHECKSUM_BYTES : 0, offset + at, p);
        if (how != MOVED)
            return how;
        crc = crc32c(crc, to + at, n);
        at += n;
    }
    return has_crc(crc, end, expected) ? MOVED : WRONG_CHECKSUM;
}

/* Read a chunk by way of the scratch. A chunk that has room there reaches its places only if its
   checksum is right. */
static int read_chunk(struct window *w, const struct band *b, int64_t i, int64_t stop,
                      const char *expected, struct progress *p) {
    struct slabs s;
    uint32_t crc = 0;
    int64_t offset = b->offset + i * (b->nbytes + CHECKSUM_BYTES);
    const int64_t payload_end = offset + b->nbytes;
    cut(&s, b->chunk, b->ndim, b->itemsize, w->room - CHECKSUM_BYTES);
    do {
        char *slab;
        const int64_t n = s.nbytes;
        const int last = offset + n == payload_end;
        const int how = look(w, offset, n + (last ? CHECKSUM_BYTES : 0), stop, &slab, p);
        if (how != MOVED)
            return how;
        crc = crc32c(crc, slab, n);
        if (last && !has_crc(crc, slab + n, expected))
            return WRONG_CHECKSUM;
        for (int k = 0; k < b->places; k++) {
            const struct place *to = &b->place[k];
            copy_common(&s, slab, to->data + i * to->next, to->start, to->shape, to->step,
                        b->itemsize, 0);
        }
        offset += n;
    } while (next_slab(&s));
    return MOVED;
}

/* The end of the bytes that are brought to the scratch with chunk `i` of the first band: complete
   chunks, or only that one. */
static int64_t end_of_window(const struct band *bands, int64_t n, int64_t i, int64_t room) {
    int64_t end = bands->offset + i * (bands->nbytes + CHECKSUM_BYTES), begin = end;
    for (int64_t k = 0; k < n && !is_direct(&bands[k]); k++, i = 0) {
        const int64_t each = bands[k].nbytes + CHECKSUM_BYTES, left = bands[k].count - i;
        const int64_t fit = (room - (end - begin)) / each;
        if (bands[k].offset + i * each != end)
            break;
        end += (fit < left ? fit : left) * each;
        if (fit < left)
            break;
    }
    return end > begin ? end : begin + bands->nbytes + CHECKSUM_BYTES;
}

/* Read the chunks of all bands from number `p->done` on; `crcs` has 4 bytes for each of them. */
static int move_in(int fd, const struct band *bands, int64_t n, const char *crcs, char *scratch,
                   int64_t room, struct progress *p) {
    struct window w = {fd, scratch, room, 0, 0};
    int64_t before = 0, moved = 0, stop = 0;
    for (int64_t k = 0; k < n; before += bands[k++].count) {
        const struct band *b = &bands[k];
        const int direct = is_direct(b);
        int64_t i = p->done > before ? p->done - before : 0;
        for (; i < b->count; i++) {
            const int64_t offset = b->offset + i * (b->nbytes + CHECKSUM_BYTES);
            const char *expected = crcs + (before + i) * CHECKSUM_BYTES;
            if (offset < w.begin || offset >= w.end) {
                if (moved && now() >= p->until)
                    return MOVED;
                stop = direct ? 0 : end_of_window(b, n - k, i, room);
            }
            moved++;
            const int how =
                direct ? read_direct(fd, b->place->data + i * b->place->next, b->nbytes, offset,
                                     expected, p)
                       : read_chunk(&w, b, i, stop, expected, p);
            if (how != MOVED)
                return how;
            p->done++;
        }
    }
    return MOVED;
}
