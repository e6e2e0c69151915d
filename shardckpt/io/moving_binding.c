/* The Python module `shardckpt.io._moving`: checks all arguments, and calls moving.c and changes.c
   without the interpreter lock. */

#define Py_LIMITED_API 0x030b0000 /* CPython 3.11 and later */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

#include "moving.c"

#include "changes.c"

/* The buffers of one call, and the memory for what describes them. */
struct call {
    Py_buffer *views;
    Py_ssize_t count;
    void *memory;
    PyThreadState *thread;
};

static int refuse(const char *why) {
    PyErr_SetString(PyExc_ValueError, why);
    return 0;
}

enum { PLAIN = PyBUF_STRIDES | PyBUF_C_CONTIGUOUS };

/* Take a buffer; its elements need not follow one another. */
static Py_buffer *take(struct call *c, PyObject *object, int flags) {
    Py_buffer *view = &c->views[c->count];
    if (PyObject_GetBuffer(object, view, flags) < 0)
        return NULL;
    c->count++;
    return view;
}

static PyObject *leave(struct call *c, PyObject *result) {
    while (c->count)
        PyBuffer_Release(&c->views[--c->count]);
    free(c->views);
    free(c->memory);
    return result;
}

/* Room for some buffers and for what describes them. */
static int prepare(struct call *c, Py_ssize_t views, size_t bytes) {
    c->views = calloc((size_t)views, sizeof *c->views);
    c->memory = calloc(1, bytes);
    if (c->views && c->memory)
        return 1;
    PyErr_NoMemory();
    return 0;
}

/* The numbers of a tuple, one for each dimension. */
static int numbers(PyObject *tuple, int ndim, int64_t least, int64_t *into) {
    if (PyTuple_Size(tuple) != ndim)
        return PyErr_Occurred() ? 0 : refuse("another number of dimensions");
    for (int d = 0; d < ndim; d++) {
        into[d] = PyLong_AsLongLong(PyTuple_GetItem(tuple, d));
        if (PyErr_Occurred())
            return 0;
        if (into[d] < least)
            return refuse("a size or an index is too small");
    }
    return 1;
}

/* First byte of a buffer, and one past the last. */
static void range_of(const Py_buffer *view, uintptr_t *low, uintptr_t *high) {
    *low = (uintptr_t)view->buf;
    *high = *low + (size_t)view->itemsize;
    for (int d = 0; d < view->ndim; d++) {
        const Py_ssize_t reach = view->shape[d] ? (view->shape[d] - 1) * view->strides[d] : 0;
        *(reach < 0 ? low : high) += (uintptr_t)reach;
    }
}

static int apart(const Py_buffer *a, const Py_buffer *b) {
    uintptr_t a_low, a_high, b_low, b_high;
    range_of(a, &a_low, &a_high);
    range_of(b, &b_low, &b_high);
    return !a->len || !b->len || a_high <= b_low || b_high <= a_low || refuse("buffers overlap");
}

/* Bytes of a chunk's elements; -1, with an error: too many. */
static int64_t bytes_of(const int64_t *chunk, int ndim, int64_t itemsize) {
    int64_t nbytes = itemsize;
    for (int d = 0; d < ndim; d++)
        if (__builtin_mul_overflow(nbytes, chunk[d], &nbytes))
            return refuse("a chunk is too large") - 1;
    return nbytes;
}

/* Whether so many chunks can be in a file from an offset on. */
static int fits(int64_t offset, int64_t count, int64_t nbytes) {
    int64_t all;
    return offset >= 0 && !__builtin_add_overflow(nbytes, CHECKSUM_BYTES, &all) &&
                   !__builtin_mul_overflow(all, count, &all) &&
                   !__builtin_add_overflow(all, offset, &all)
               ? 1
               : refuse("a place in a file is impossible");
}

/* Called in the middle of a call, after a signal. */
static int interrupted(void *context) {
    struct call *c = context;
    PyEval_RestoreThread(c->thread);
    const int is = PyErr_CheckSignals() < 0;
    c->thread = PyEval_SaveThread();
    return is;
}

static struct progress begin(struct call *c, int64_t done, double seconds) {
    seconds = seconds > 0 ? seconds < 1e6 ? seconds : 1e6 : 0;
    return (struct progress){done, now() + (int64_t)(seconds * 1e9), interrupted, c, 0};
}

static PyObject *ended(struct call *c, int how, const struct progress *p) {
    return leave(c, how == STOPPED ? NULL
                                   : Py_BuildValue("iLi", how, (long long)p->done,
                                                   how == SYSTEM_ERROR ? p->error : 0));
}

static PyObject *write_chunks(PyObject *self, PyObject *arguments) {
    (void)self;
    PyObject *blocks, *chunk, *crcs, *scratch;
    long long offset, begun, first, last;
    double seconds;
    struct writing w = {0};
    if (!PyArg_ParseTuple(arguments, "iLLO!O!LLOOd", &w.fd, &offset, &begun, &PyTuple_Type, &blocks,
                          &PyTuple_Type, &chunk, &first, &last, &crcs, &scratch, &seconds))
        return NULL;
    const Py_ssize_t n = PyTuple_Size(blocks);
    struct call c = {0};
    if (!prepare(&c, n + 2, (size_t)(n + 1) * sizeof(struct block)))
        return leave(&c, NULL);
    const Py_buffer *sums = take(&c, crcs, PyBUF_WRITABLE | PLAIN);
    const Py_buffer *memory = sums ? take(&c, scratch, PyBUF_WRITABLE | PLAIN) : NULL;
    if (!memory || !apart(sums, memory))
        return leave(&c, NULL);
    struct block *described = c.memory;
    int64_t total = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        const Py_buffer *view = take(&c, PyTuple_GetItem(blocks, i), PyBUF_STRIDES);
        if (!view || !apart(view, memory) || !apart(view, sums))
            return leave(&c, NULL);
        if (i == 0) {
            w.ndim = view->ndim;
            w.itemsize = view->itemsize;
            if ((w.ndim > MOST_DIMS && !refuse("too many dimensions")) ||
                !numbers(chunk, w.ndim, 1, w.chunk))
                return leave(&c, NULL);
            total = n;
        }
        int same = view->ndim == w.ndim && view->itemsize == w.itemsize && w.itemsize > 0;
        for (int d = 0; same && d < w.ndim; d++) {
            same = view->shape[d] > 0 && (i == 0 || view->shape[d] == w.shape[d]);
            w.shape[d] = view->shape[d];
            described[i].step[d] = view->strides[d];
            same &=
                i > 0 || !__builtin_mul_overflow(total, (w.shape[d] - 1) / w.chunk[d] + 1, &total);
        }
        described[i].data = view->buf;
        if (!same && !refuse("blocks differ, are empty or too large"))
            return leave(&c, NULL);
    }
    const int64_t nbytes = bytes_of(w.chunk, w.ndim, w.itemsize);
    if (nbytes < 0 ||
        (!(0 <= first && first < last && last <= total) && !refuse("no such chunks")) ||
        !fits(offset, last - first, nbytes) ||
        ((begun < 0 || begun > offset) &&
         !refuse("a file begins to be written where there is nothing")) ||
        (sums->len != (last - first) * CHECKSUM_BYTES && !refuse("another number of checksums")) ||
        ((memory->len < w.itemsize || memory->len < CHECKSUM_BYTES) &&
         !refuse("too little scratch")) ||
        (w.fd < 0 && memory->len / (last - first) < nbytes + CHECKSUM_BYTES &&
         !refuse("too little memory")))
        return leave(&c, NULL);
    w.offset = offset;
    w.begun = begun;
    w.blocks = described;
    w.first = first;
    w.last = last;
    w.crcs = sums->buf;
    w.scratch = memory->buf;
    w.room = memory->len;
    struct progress p = begin(&c, 0, seconds);
    c.thread = PyEval_SaveThread();
    const int how = move_out(&w, &p);
    PyEval_RestoreThread(c.thread);
    return ended(&c, how, &p);
}

/* Describe one place of a band; 0, with an error: it is impossible. */
static int describe(struct call *c, const struct band *b, PyObject *item, const Py_buffer *memory,
                    struct place *to) {
    PyObject *buffer, *start;
    int along;
    if (!PyTuple_Check(item))
        return refuse("a place is a tuple");
    if (!PyArg_ParseTuple(item, "OO!i", &buffer, &PyTuple_Type, &start, &along))
        return 0;
    const Py_buffer *view = take(c, buffer, PyBUF_WRITABLE | PyBUF_STRIDES);
    if (!view || !apart(view, memory) || !numbers(start, b->ndim, 0, to->start))
        return 0;
    if (view->ndim != b->ndim || view->itemsize != b->itemsize)
        return refuse("a place has other elements than its band");
    if (b->count > 1 && (along < 0 || along >= b->ndim || view->shape[along] % b->count))
        return refuse("a place cannot be divided among its chunks");
    to->data = view->buf;
    for (int d = 0; d < b->ndim; d++) {
        to->step[d] = view->strides[d];
        to->shape[d] = b->count > 1 && d == along ? view->shape[d] / b->count : view->shape[d];
        if (to->shape[d] < 1 || to->start[d] > b->chunk[d] - to->shape[d])
            return refuse("a place reaches beyond its chunk");
    }
    to->next = b->count > 1 ? to->shape[along] * to->step[along] : 0;
    return 1;
}

static PyObject *read_chunks(PyObject *self, PyObject *arguments) {
    (void)self;
    PyObject *bands, *crcs, *scratch;
    int fd;
    long long done;
    double seconds;
    if (!PyArg_ParseTuple(arguments, "iO!LOOd", &fd, &PyTuple_Type, &bands, &done, &crcs, &scratch,
                          &seconds))
        return NULL;
    const Py_ssize_t n = PyTuple_Size(bands);
    Py_ssize_t places = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyTuple_GetItem(bands, i);
        if (!PyTuple_Check(item) || PyTuple_Size(item) != 5 ||
            !PyTuple_Check(PyTuple_GetItem(item, 4)))
            return refuse("a band is a tuple of five, the last a tuple"), NULL;
        places += PyTuple_Size(PyTuple_GetItem(item, 4));
    }
    struct call c = {0};
    if (!prepare(&c, places + 2,
                 (size_t)(n + 1) * sizeof(struct band) +
                     (size_t)(places + 1) * sizeof(struct place)))
        return leave(&c, NULL);
    struct band *b = c.memory;
    struct place *to = (struct place *)(b + n + 1), *const end = to + places;
    const Py_buffer *expected = take(&c, crcs, PLAIN);
    const Py_buffer *memory = expected ? take(&c, scratch, PyBUF_WRITABLE | PLAIN) : NULL;
    if (!memory || !apart(expected, memory))
        return leave(&c, NULL);
    int64_t total = 0;
    for (Py_ssize_t i = 0; i < n; i++, b++) {
        PyObject *chunk, *list;
        long long offset, count, itemsize;
        if (!PyArg_ParseTuple(PyTuple_GetItem(bands, i), "LLLO!O!", &offset, &count, &itemsize,
                              &PyTuple_Type, &chunk, &PyTuple_Type, &list))
            return leave(&c, NULL);
        b->offset = offset;
        b->count = count;
        b->itemsize = itemsize;
        b->ndim = (int)PyTuple_Size(chunk);
        b->places = (int)PyTuple_Size(list);
        b->place = to;
        if ((b->ndim > MOST_DIMS || count < 1 || itemsize < 1 ||
             itemsize > memory->len - CHECKSUM_BYTES || b->places > end - to) &&
            !refuse("a band is impossible"))
            return leave(&c, NULL);
        if (!numbers(chunk, b->ndim, 1, b->chunk) ||
            (b->nbytes = bytes_of(b->chunk, b->ndim, itemsize)) < 0 ||
            !fits(offset, count, b->nbytes) ||
            (__builtin_add_overflow(total, count, &total) && !refuse("too many chunks")))
            return leave(&c, NULL);
        for (int k = 0; k < b->places; k++)
            if (!describe(&c, b, PyTuple_GetItem(list, k), memory, to++))
                return leave(&c, NULL);
    }
    if ((total > INT64_MAX / CHECKSUM_BYTES || expected->len != total * CHECKSUM_BYTES ||
         done < 0 || done > total) &&
        !refuse("another number of checksums"))
        return leave(&c, NULL);
    struct progress p = begin(&c, done, seconds);
    c.thread = PyEval_SaveThread();
    const int how = move_in(fd, c.memory, n, expected->buf, memory->buf, memory->len, &p);
    PyEval_RestoreThread(c.thread);
    return ended(&c, how, &p);
}

static PyObject *find_changes(PyObject *self, PyObject *arguments) {
    (void)self;
    PyObject *olds, *news, *results, *room;
    int size;
    if (!PyArg_ParseTuple(arguments, "O!O!iOO", &PyTuple_Type, &olds, &PyTuple_Type, &news, &size,
                          &results, &room))
        return NULL;
    const Py_ssize_t n = PyTuple_Size(olds);
    if (PyTuple_Size(news) != n)
        return refuse("another number of chunks"), NULL;
    if (size != 1 && size != 2 && size != 4 && size != 8)
        return refuse("elements of other sizes are compared by Python"), NULL;
    struct call c = {0};
    if (!prepare(&c, 2 * n + 2, (size_t)(n + 1) * sizeof(struct box)))
        return leave(&c, NULL);
    const Py_buffer *written = take(&c, results, PyBUF_WRITABLE | PLAIN);
    const Py_buffer *out = written ? take(&c, room, PyBUF_WRITABLE | PLAIN) : NULL;
    if (!out || !apart(written, out) ||
        (written->len != n * (Py_ssize_t)sizeof(struct comparison) &&
         !refuse("another number of results")))
        return leave(&c, NULL);
    const Py_buffer *chunks = out + 1;
    struct box *const boxes = c.memory;
    for (Py_ssize_t i = 0; i < n; i++) {
        const Py_buffer *old = take(&c, PyTuple_GetItem(olds, i), PyBUF_WRITABLE | PLAIN);
        const Py_buffer *new = old ? take(&c, PyTuple_GetItem(news, i), PyBUF_STRIDES) : NULL;
        /* `new` has complete elements of `size` bytes, and so has `old` if it is as long. */
        if (!new || !apart(old, new) || !apart(old, out) || !apart(new, out) ||
            !apart(old, written) || !apart(new, written) ||
            (new->itemsize != size && !refuse("new elements have another size")) ||
            (new->ndim > MOST_DIMS && !refuse("too many dimensions")) ||
            ((old->len != new->len || old->len / size > UINT32_MAX) &&
             !refuse("a chunk has another length")) ||
            (room_for_changes(old->len / size, size) > out->len &&
             !refuse("too little room for what changed")))
            return leave(&c, NULL);
        boxes[i].data = new->buf;
        boxes[i].ndim = new->ndim;
        for (int d = 0; d < new->ndim; d++) {
            boxes[i].shape[d] = new->shape[d];
            boxes[i].step[d] = new->strides[d];
        }
    }
    c.thread = PyEval_SaveThread();
    int64_t used = 0, done = 0;
    struct comparison *to = written->buf;
    for (; done < n; done++) {
        const Py_buffer *old = &chunks[2 * done];
        const int64_t elements = old->len / size;
        if (room_for_changes(elements, size) > out->len - used)
            break;
        to[done] = changes(old->buf, &boxes[done], elements, size, (char *)out->buf + used);
        used += to[done].changed * (1 + size) + 4 * to[done].long_gaps;
    }
    PyEval_RestoreThread(c.thread);
    return leave(&c, PyLong_FromLongLong(done));
}

static PyMethodDef functions[] = {
    {"write_chunks", write_chunks, METH_VARARGS,
     "Write chunks of blocks to a file, or without one to the scratch; return how the call ended, "
     "chunks written, errno."},
    {"read_chunks", read_chunks, METH_VARARGS,
     "Read chunks from a file; return how the call ended, chunks read, errno."},
    {"find_changes", find_changes, METH_VARARGS,
     "Compare chunks with earlier ones, which become these; return how many had room."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    const char *plain = getenv("SHARDCKPT_CRC_TABLE"); /* for tests */
    moving_begin(plain && *plain);
    return PyModule_AddIntConstant(module, "MOST_DIMS", MOST_DIMS);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_moving", NULL, 0, functions, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__moving(void) { return PyModuleDef_Init(&definition); }
