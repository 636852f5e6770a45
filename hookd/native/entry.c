/* The entry: a C function in the place of the one that runs when Python calls `nn.Module.__call__`.
 *
 * A Python function object has a field `vectorcall`, and `module(x)` calls `__call__` through it. This file replaces that
 * field of torch's own function and of nothing else: the function stays in its class, and its code, which is what
 * torch.compile reads, stays as it is. The entry looks the module up by its address. One that is not observed is called
 * straight through, without a Python frame; one of which only totals are kept is counted here; for every other one a Python
 * function, its plan, is called with (module, args, kwargs).
 *
 * Every function here runs with the interpreter's lock held; the state is common to all threads. The prototypes are
 * written out by hand, so that one file serves CPython 3.10 to 3.14: all of them are exported there, and those declared
 * weak by some. Of libc it calls the clock alone.
 *
 * Source: Objects/call.c `_PyObject_VectorcallTstate`, Objects/funcobject.c `PyFunction_SetVectorcall`, 3.14.
 */
#include <stddef.h>
#include <stdint.h>
#include <time.h>

typedef struct _object PyObject;
typedef ptrdiff_t Py_ssize_t;
typedef PyObject *(*Vectorcall)(PyObject *, PyObject *const *, size_t, PyObject *);

extern PyObject _Py_FalseStruct, _Py_NoneStruct, _Py_TrueStruct, PyTuple_Type;
extern PyObject *PyDict_New(void);
extern int PyDict_SetItem(PyObject *, PyObject *, PyObject *);
extern void PyErr_Clear(void);
extern void PyErr_Fetch(PyObject **, PyObject **, PyObject **);
extern void PyErr_NormalizeException(PyObject **, PyObject **, PyObject **);
extern void PyErr_Restore(PyObject *, PyObject *, PyObject *);
extern void PyException_SetContext(PyObject *, PyObject *);
extern int PyException_SetTraceback(PyObject *, PyObject *);
extern double PyFloat_AsDouble(PyObject *);
extern PyObject *PyFloat_FromDouble(double);
extern int PyList_Append(PyObject *, PyObject *);
extern PyObject *PyList_GetItem(PyObject *, Py_ssize_t);
extern int PyList_SetItem(PyObject *, Py_ssize_t, PyObject *);
extern int PyList_SetSlice(PyObject *, Py_ssize_t, Py_ssize_t, PyObject *);
extern Py_ssize_t PyList_Size(PyObject *);
extern long long PyLong_AsLongLong(PyObject *);
extern PyObject *PyLong_FromLongLong(long long);
extern PyObject *PyObject_Call(PyObject *, PyObject *, PyObject *);
extern PyObject *PyObject_GetAttr(PyObject *, PyObject *);
extern PyObject *PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);
extern PyObject *PyObject_VectorcallMethod(PyObject *, PyObject *const *, size_t, PyObject *);
extern void *PyThreadState_Get(void);
extern uint64_t PyThreadState_GetID(void *);
extern void PyThreadState_EnterTracing(void *) __attribute__((weak)); /* 3.11 and newer */
extern void PyThreadState_LeaveTracing(void *) __attribute__((weak));
extern PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
extern PyObject *PyTuple_New(Py_ssize_t);
extern int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *);
extern Py_ssize_t PyTuple_Size(PyObject *);
extern PyObject *PyUnicode_InternFromString(const char *);
extern PyObject *PyWeakref_NewRef(PyObject *, PyObject *);
extern Vectorcall PyVectorcall_Function(PyObject *);
extern void PyFunction_SetVectorcall(PyObject *, Vectorcall) __attribute__((weak)); /* 3.12 and newer */
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);
extern PyObject *PyList_New(Py_ssize_t);
extern void *PyMem_RawCalloc(size_t, size_t);
extern void PyMem_RawFree(void *);
extern void Py_DecRef(PyObject *);
extern void Py_IncRef(PyObject *);

#define EXPORTED __attribute__((visibility("default")))
#define OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1)) /* PY_VECTORCALL_ARGUMENTS_OFFSET */
enum { VERSION = 8, LEAST = 1024, SHAPES = 256, STACK = 1 << 20 };

typedef struct { /* the cells of a page to which each call is added; any may be NULL */
    double *seconds, *own, *calls;
} Totals;

typedef struct { /* of a module whose calls are counted here, as long as no Python function of a plugin listens to them */
    uint64_t number; /* no other one has had it */
    PyObject *module, *cell;
    double value; /* that of `cell`: the module in a heartbeat */
    size_t shape;
    int remembers, checks; /* what it returns is kept; is looked at */
    size_t count;
    Totals totals[];
} Count;

typedef struct {
    uintptr_t key;  /* a module's address; 0: free, 1: was used, and the search goes on */
    PyObject *plan; /* NULL: call straight through */
    PyObject *metered; /* its plan in a metered step; NULL: `plan` finds it */
    Count *counted; /* NULL: the plan counts */
} Slot;

typedef struct { /* where a thread's state in the interpreter has its depth of calls; `offset` is 0 where that is not known */
    size_t offset;
    int is_counted_up, limit; /* it is what is left of the limit, or counts up to it (CPython 3.10) */
    int room;                 /* so many levels hookd may need for itself */
} Depth;

typedef struct { /* as hookd/target/entry/c_entry.py `_Host` has it */
    PyObject *local;                 /* `local.thread` is the calling thread's state */
    PyObject *unwind;                /* called as unwind(state, outer, module, error) where a call is left by an exception */
    PyObject *remember;              /* as remember(state, module, args, kwargs, output) where this file cannot */
    PyObject *record;                /* as record(kind, module, step) at each call of a metered step */
    PyObject *suspect;               /* as suspect(state, module, args, kwargs, output, before): see `checked` */
    PyObject *tensor, *parameter;    /* torch.Tensor and torch.nn.Parameter */
    PyObject *whole;                 /* torch's `_wrapped_call_impl` as a function of its own, which is not entered */
    PyObject *modes, *tracing;       /* return 0 and None where a tensor may be asked for its version */
    PyObject *profile, *tool;        /* return None where no profiler listens to the thread; NULL: nobody can say */
    PyObject *dtypes[10];            /* those of kernel.c, in its order, and then whole numbers, which are all finite */
    int (*gate)(const void *, int64_t, int, int); /* `hookd_is_finite` of kernel.c; NULL: nothing is looked at */
    double (*largest)(const void *const *, const int64_t *, int, int, int); /* `hookd_largest` of it */
    size_t level;                    /* its instructions */
    double *cells;                   /* of the page */
    size_t phase;                    /* from a heartbeat's module to its step, in cells */
    size_t kind;                     /* of the record of a call */
    size_t most, each;               /* elements that are kept alive, and what a call counts beside its own */
    size_t top, busy, backwards, beat, inner, kept, returned, hidden, base, profiled; /* where the thread's state has them, in bytes */
    size_t waits;                    /* where a hookd Module has it */
} Host;

typedef struct { /* where torch has what of a tensor, in bytes, as hookd/target/tensors/layout.py has found it; `impl` is 0 where it has not */
    size_t impl;                                                          /* in the Python object; the others are in that */
    size_t keys, dtype, numel, start, contiguous, mask, storage, version; /* `mask` is the bit of the byte `contiguous` */
    size_t count;                                                         /* in what `version` points to */
    size_t base, nbytes, deleter;                                         /* in what `storage` points to */
    size_t autograd, grad;                                                /* `grad` is in what `autograd` points to */
    uint64_t plain, owner; /* the keys of a plain tensor in the host's memory, and the deleter of what torch's allocator has made */
    uint64_t nothing;      /* the gradient of what has none */
    uint16_t dtypes[10];   /* as in `Host` */
} Layout;

static struct {
    Slot *slots;
    size_t mask, filled, present; /* filled: with those that were used */
    Vectorcall standard;          /* what a Python function has in the field by itself */
    PyObject *missing;            /* called for a module that is not in the table */
    PyObject *impl;               /* torch's `_call_impl` */
    PyObject *compiled;           /* the string "_compiled_call_impl" */
    long inside;                  /* calls that are in this file now, in all threads */
    int watched;                  /* a function is entered here */
    Host host;                    /* its objects live until no call is inside any more */
    Layout layout;
    int counts;                   /* calls are counted here */
    PyObject *kind, *zero, *thread_name, *version_name, *numel_name, *leaf_name, *storage_name, *offset_name, *address_name,
        *nbytes_name, *resizable_name, *dtype_name, *contiguous_name, *host_name, *shape_name, *stride_name, *grad_name;
    PyObject *state;              /* of the thread that came last, whose number is `thread`; no two threads have one */
    uint64_t thread, numbers;
    unsigned char armed[SHAPES];  /* a Python function listens to calls of this shape */
    unsigned char unseen[SHAPES]; /* something that a call of this shape returned could not be looked at */
    int metered;
    int checks;                   /* what calls return is looked at, and `suspect` is told */
    int alert;                    /* it is told of all of them */
    long passed;                  /* calls of which it should have been told, and nobody could look */
    int64_t spent;                /* ns of a metered step in this file, and in what it calls of hookd */
    Depth depth;
    long deep;                    /* calls so near to the limit that they were not observed */
} entry;

static size_t hash(uintptr_t key) { return (size_t)(((key >> 4) * 0x9E3779B97F4A7C15ull) >> 20); }

static Slot *find(uintptr_t key) {
    for (size_t at = hash(key) & entry.mask;; at = (at + 1) & entry.mask) {
        Slot *slot = &entry.slots[at];
        if (slot->key == key || !slot->key)
            return slot->key ? slot : NULL;
    }
}

static PyObject **at(PyObject *object, size_t offset) { return (PyObject **)((char *)object + offset); }

/* Run the module as if hookd were not there. Torch's `_wrapped_call_impl` only chooses between two functions
 * (torch/nn/modules/module.py, 2.1 to 2.14); to choose here saves packing the arguments once more. Where a profiler listens it is called
 * all the same: by its code `torch.profiler` knows a module's call. */
static PyObject *through(PyObject *state, PyObject *const *args, size_t nargsf, PyObject *names) {
    if (state && *at(state, entry.host.profiled) == &_Py_TrueStruct)
        return PyObject_Vectorcall(entry.host.whole, args, nargsf, names);
    PyObject *compiled = PyObject_GetAttr(args[0], entry.compiled);
    if (!compiled)
        return NULL;
    PyObject *result;
    if (compiled == &_Py_NoneStruct)
        result = PyObject_Vectorcall(entry.impl, args, nargsf, names);
    else
        result = PyObject_Vectorcall(compiled, args + 1, (nargsf & ~OFFSET) - 1, names);
    Py_DecRef(compiled);
    return result;
}

static PyObject *packed(PyObject *const *args, Py_ssize_t count) {
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++) {
        Py_IncRef(args[i]);
        PyTuple_SetItem(tuple, i, args[i]);
    }
    return tuple;
}

static PyObject *named(PyObject *const *values, PyObject *names) {
    PyObject *dict = PyDict_New();
    Py_ssize_t count = dict && names ? PyTuple_Size(names) : 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyDict_SetItem(dict, PyTuple_GetItem(names, i), values[i]) < 0) {
            Py_DecRef(dict);
            return NULL;
        }
    return dict;
}

static void set_to(PyObject **place, PyObject *value) { /* steals the value, which may be NULL: no memory */
    PyObject *old = *place;
    if (!value) {
        PyErr_Clear();
        return;
    }
    *place = value;
    Py_DecRef(old);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* The state of the calling thread, borrowed; NULL: there is none. This may run any code, once for a thread. */
static PyObject *here(void) {
    if (!entry.counts)
        return NULL;
    uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
    if (thread != entry.thread || !entry.state) {
        PyObject *state = PyObject_GetAttr(entry.host.local, entry.thread_name), *old = entry.state;
        if (!state) {
            PyErr_Clear();
            return NULL;
        }
        entry.state = state, entry.thread = thread;
        if (old)
            Py_DecRef(old);
    }
    return entry.state;
}

/* Whether calling `function` gives this very object: a question that costs no Python frame. */
static int gives(PyObject *function, PyObject *expected) {
    PyObject *answer = PyObject_Vectorcall(function, NULL, 0, NULL);
    if (!answer)
        PyErr_Clear();
    else
        Py_DecRef(answer); /* small numbers and None live for ever */
    return answer == expected;
}

static int is_profiled(void) {
    const Host *host = &entry.host;
    return host->profile && !(gives(host->profile, &_Py_NoneStruct) && (!host->tool || gives(host->tool, &_Py_NoneStruct)));
}

static void suspend(PyObject *state) {
    Py_IncRef(&_Py_TrueStruct);
    set_to(at(state, entry.host.hidden), &_Py_TrueStruct);
    PyThreadState_EnterTracing(PyThreadState_Get());
}

/* Keep what hookd does from now on out of a profile of the training, as the interpreter does with what a profiler itself calls:
 * hookd/target/entry/hidden.py. Return whether it was seen before, which is what `show` needs. */
static int hide(PyObject *state) {
    if (!state || !PyThreadState_EnterTracing || *at(state, entry.host.hidden) != &_Py_FalseStruct || !is_profiled())
        return 0;
    Py_IncRef(state); /* a detach may end it meanwhile */
    suspend(state);
    return 1;
}

static void show(PyObject *state, int was_seen) {
    if (!was_seen)
        return;
    PyThreadState_LeaveTracing(PyThreadState_Get());
    Py_IncRef(&_Py_FalseStruct);
    set_to(at(state, entry.host.hidden), &_Py_FalseStruct);
    Py_DecRef(state);
}

/* Call a Python function of hookd's. */
static PyObject *asking(PyObject *state, PyObject *function, PyObject *const *given, size_t count) {
    Py_IncRef(function); /* it may be replaced meanwhile */
    int was_seen = hide(state);
    PyObject *result = PyObject_Vectorcall(function, given, count | OFFSET, NULL);
    show(state, was_seen);
    Py_DecRef(function);
    return result;
}

/* Call `function` with the `size` values of `given`, behind a place that is free; the arguments of a module's call are put
 * into the two from `given[place]` on, packed. */
static PyObject *with_packed(PyObject *state, PyObject *function, PyObject **given, size_t size, size_t place,
                             PyObject *const *args, Py_ssize_t count, PyObject *names) {
    PyObject *result = NULL, *tuple = packed(args + 1, count - 1), *dict = tuple ? named(args + count, names) : NULL;
    if (dict) {
        given[place] = tuple, given[place + 1] = dict;
        result = asking(state, function, given + 1, size);
    }
    if (tuple)
        Py_DecRef(tuple);
    if (dict)
        Py_DecRef(dict);
    return result;
}

static PyObject *planned(PyObject *state, PyObject *plan, PyObject *const *args, Py_ssize_t count, PyObject *names) {
    PyObject *given[4] = {NULL, args[0]};
    return with_packed(state, plan, given, 3, 2, args, count, names);
}

/* What was counted when a call began may be gone when it ends: by a detach, or another plugin. */
static Count *still(uintptr_t key, uint64_t number) {
    Slot *slot = entry.slots && entry.counts ? find(key) : NULL;
    return slot && slot->counted && slot->counted->number == number ? slot->counted : NULL;
}

/* Have Python put right what a call leaves behind that an exception ends; the exception goes on. */
static void left(PyObject *state, PyObject *outer, PyObject *module) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace)
        PyException_SetTraceback(error, trace);
    PyObject *given[5] = {NULL, state, outer, module, error};
    PyObject *done = asking(state, entry.host.unwind, given + 1, 4);
    if (done) {
        Py_DecRef(done);
        PyErr_Restore(type, error, trace);
        return;
    }
    PyObject *kind, *other, *where; /* a signal handler's, say: it takes the place of the first */
    PyErr_Fetch(&kind, &other, &where);
    PyErr_NormalizeException(&kind, &other, &where);
    if (other != error)
        PyException_SetContext(other, error); /* steals it */
    else
        Py_DecRef(error);
    Py_DecRef(type);
    if (trace)
        Py_DecRef(trace);
    PyErr_Restore(kind, other, where);
}

/* Whether a tensor may be asked for anything: no mode sees it, and no trace notes it. */
static int may_ask(void) { return gives(entry.host.modes, entry.zero) && gives(entry.host.tracing, &_Py_NoneStruct); }

#define FIELD(type, object, offset) (*(const type *)((const char *)(object) + (offset)))

/* What torch has of a plain tensor, to be read without a question; NULL: of this one it has to be asked. The keys of a tensor say all that
 * makes it another one: its device and layout, a transform, a mode, a bit for its sign, a class of its own. */
static const void *plain(PyObject *tensor) {
    const Layout *layout = &entry.layout;
    if (!layout->impl || ((PyObject **)tensor)[1] != entry.host.tensor)
        return NULL;
    const void *impl = FIELD(void *, tensor, layout->impl);
    return impl && FIELD(uint64_t, impl, layout->keys) == layout->plain ? impl : NULL;
}

static PyObject *version_in(const void *impl) {
    const void *version = FIELD(void *, impl, entry.layout.version);
    return version ? PyLong_FromLongLong(FIELD(uint32_t, version, entry.layout.count)) : NULL;
}

/* Keep a small output alive for who looks only where something is bad: the plan's REMEMBER (hookd/target/entry/plan.py).
 * 0: this is none of those, or something failed; nothing was kept, and no exception is set. */
static int kept(PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *output) {
    const Host *host = &entry.host;
    long long size = PyLong_AsLongLong(*at(state, host->kept));
    if (*at(module, host->waits) == entry.zero || size >= (long long)host->most || ((PyObject **)output)[1] != host->tensor)
        return 0;
    const void *impl = plain(output);
    if (!impl && !may_ask())
        return 0;
    PyObject *number = impl ? PyLong_FromLongLong(FIELD(int64_t, impl, entry.layout.numel))
                            : PyObject_VectorcallMethod(entry.numel_name, &output, 1, NULL);
    PyObject *version = !number ? NULL : impl ? version_in(impl) : PyObject_GetAttr(output, entry.version_name);
    PyObject *inputs = version ? packed(args + 1, count - 1) : NULL, *one = inputs ? PyTuple_New(4) : NULL;
    int is_kept = 0;
    if (one) {
        Py_IncRef(module), Py_IncRef(inputs), Py_IncRef(output), Py_IncRef(version);
        PyTuple_SetItem(one, 0, module), PyTuple_SetItem(one, 1, inputs);
        PyTuple_SetItem(one, 2, output), PyTuple_SetItem(one, 3, version);
        is_kept = !PyList_Append(*at(state, host->returned), one);
        if (is_kept)
            set_to(at(state, host->kept), PyLong_FromLongLong(size + PyLong_AsLongLong(number) + (long long)host->each));
    }
    if (!is_kept)
        PyErr_Clear();
    PyObject *made[] = {number, version, inputs, one};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        if (made[i])
            Py_DecRef(made[i]);
    return is_kept;
}

/* Return what stands for a call that `kept` has kept when it is kept alive no more: (module, weak reference, version). NULL, with no
 * exception set: it is another's, or its output may be a parameter or a buffer, which must not have a weak reference. */
static PyObject *weakly(PyObject *one) {
    if (((PyObject **)one)[1] != &PyTuple_Type || PyTuple_Size(one) != 4)
        return NULL;
    PyObject *output = PyTuple_GetItem(one, 2), *is_leaf = PyObject_GetAttr(output, entry.leaf_name);
    PyObject *ref = is_leaf == &_Py_FalseStruct ? PyWeakref_NewRef(output, NULL) : NULL, *weak = ref ? PyTuple_New(3) : NULL;
    if (weak) {
        PyObject *module = PyTuple_GetItem(one, 0), *version = PyTuple_GetItem(one, 3);
        Py_IncRef(module), Py_IncRef(ref), Py_IncRef(version);
        PyTuple_SetItem(weak, 0, module), PyTuple_SetItem(weak, 1, ref), PyTuple_SetItem(weak, 2, version);
    } else {
        PyErr_Clear();
    }
    if (is_leaf)
        Py_DecRef(is_leaf);
    if (ref)
        Py_DecRef(ref);
    return weak;
}

/* Remember an output on a device, weakly, as `weakly` makes it: nobody looks at what it was made of, which would wait for the device. 0: as
 * `kept` has it. */
static int noted(PyObject *state, PyObject *module, PyObject *output) {
    const Host *host = &entry.host;
    long long size = PyLong_AsLongLong(*at(state, host->kept));
    if (((PyObject **)output)[1] != host->tensor || size >= (long long)host->most || plain(output) || !may_ask())
        return 0;
    PyObject *answers[] = {PyObject_GetAttr(output, entry.host_name), NULL, NULL, NULL, NULL}, *one = NULL;
    int is_noted = 0;
    if (answers[0] == &_Py_FalseStruct && (answers[1] = PyObject_GetAttr(output, entry.leaf_name)) == &_Py_FalseStruct &&
        (answers[2] = PyObject_GetAttr(output, entry.version_name)) && (answers[3] = PyWeakref_NewRef(output, NULL)) &&
        (one = answers[4] = PyTuple_New(3))) {
        Py_IncRef(module), Py_IncRef(answers[3]), Py_IncRef(answers[2]);
        PyTuple_SetItem(one, 0, module), PyTuple_SetItem(one, 1, answers[3]), PyTuple_SetItem(one, 2, answers[2]);
        is_noted = !PyList_Append(*at(state, host->returned), one);
        if (is_noted)
            set_to(at(state, host->kept), PyLong_FromLongLong(size + (long long)host->each));
    }
    if (!is_noted)
        PyErr_Clear();
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++)
        if (answers[i])
            Py_DecRef(answers[i]);
    return is_noted;
}

/* Remember what a call has returned. -1: an exception is set, a signal handler's. */
static int remembered(PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names,
                      PyObject *output) {
    if (kept(state, module, args, count, output) || noted(state, module, output))
        return 0;
    PyObject *given[6] = {NULL, state, module, NULL, NULL, output};
    PyObject *done = with_packed(state, entry.host.remember, given, 5, 3, args, count, names);
    if (done)
        Py_DecRef(done);
    return done ? 0 : -1;
}

enum { SEEN, BAD, UNSEEN }; /* of an output: no infinity and no NaN in it but -inf; some; nobody can say */
enum { BRIEF = 1 << 16 };   /* elements, which take some microseconds; hookd/target/tensors/kernel.py has the same */
enum { TOGETHER = 1 << 18 }; /* elements of many tensors: to keep their storages, to let the lock go, takes as long as to read these */
static const int WIDTHS[4] = {4, 8, 2, 2};

/* Ask an object for a whole number by one of its methods. -1: it has raised; no exception is set. */
static long long asked(PyObject *object, PyObject *name) {
    PyObject *answer = PyObject_VectorcallMethod(name, &object, 1, NULL);
    long long number = answer ? PyLong_AsLongLong(answer) : -1;
    if (answer)
        Py_DecRef(answer);
    if (number < 0)
        PyErr_Clear();
    return number;
}

static int is_true(PyObject *answer) { /* steals it; NULL: no */
    if (!answer)
        PyErr_Clear();
    else
        Py_DecRef(answer);
    return answer == &_Py_TrueStruct;
}

/* How many elements there are from the first of a tensor to the furthest one; -1: nobody can say. What lies between them is not all its
 * own, so what is found there is only suspected. */
static long long span_of(PyObject *tensor, long long elements) {
    if (is_true(PyObject_VectorcallMethod(entry.contiguous_name, &tensor, 1, NULL)))
        return elements;
    PyObject *sizes = PyObject_GetAttr(tensor, entry.shape_name);
    PyObject *strides = sizes ? PyObject_VectorcallMethod(entry.stride_name, &tensor, 1, NULL) : NULL;
    long long span = strides ? 1 : -1;
    Py_ssize_t dims = strides ? PyTuple_Size(strides) : 0;
    for (Py_ssize_t i = 0; i < dims && span > 0 && span <= BRIEF; i++) {
        long long size = PyLong_AsLongLong(PyTuple_GetItem(sizes, i)), stride = PyLong_AsLongLong(PyTuple_GetItem(strides, i));
        span = size > 0 && stride >= 0 && size <= BRIEF && stride <= BRIEF ? span + (size - 1) * stride : -1;
    }
    if (sizes)
        Py_DecRef(sizes);
    if (strides)
        Py_DecRef(strides);
    PyErr_Clear();
    return span;
}

/* Where the first of `span` elements lies, all of which are in `room` bytes from `base` on; NULL: they are not. */
static const void *place_of(long long base, long long start, long long span, long long room, int type) {
    start *= WIDTHS[type];
    if (base <= 0 || start < 0 || start + span * WIDTHS[type] > room || (base + start) % WIDTHS[type])
        return NULL;
    return (const void *)(uintptr_t)(base + start);
}

static int numbers_are(const void *place, long long span, int type) {
    return !place ? UNSEEN : entry.host.gate(place, span, type, (int)entry.host.level) == 2 ? BAD : SEEN;
}

static int type_of(const void *impl) { /* as in `Host`; 10: another one */
    uint16_t dtype = FIELD(uint16_t, impl, entry.layout.dtype);
    int type = 0;
    while (type < 10 && dtype != entry.layout.dtypes[type])
        type++;
    return type;
}

/* Where the numbers of a plain tensor of one of the first four types lie side by side; NULL: it has to be asked. */
static const void *numbers_of(const void *impl, int type) {
    const Layout *layout = &entry.layout;
    const void *storage = FIELD(void *, impl, layout->storage);
    if (!(FIELD(uint8_t, impl, layout->contiguous) & layout->mask) || !storage ||
        FIELD(uint64_t, storage, layout->deleter) != layout->owner)
        return NULL;
    return place_of(FIELD(int64_t, storage, layout->base), FIELD(int64_t, impl, layout->start), FIELD(int64_t, impl, layout->numel),
                    FIELD(int64_t, storage, layout->nbytes), type);
}

/* Look at the numbers of a plain tensor. UNSEEN: it has to be asked. */
static int plain_is(const void *impl) {
    long long elements = FIELD(int64_t, impl, entry.layout.numel);
    int type = type_of(impl);
    if (type >= 4 || !elements)
        return type < 10 ? SEEN : UNSEEN;
    return elements < 0 || elements > BRIEF ? UNSEEN : numbers_are(numbers_of(impl, type), elements, type);
}

/* Look at the numbers of a tensor where all of them are in the host's memory: what hookd/target/tensors/host_memory.py `locate` asks. */
static int tensor_is(PyObject *tensor) {
    const Host *host = &entry.host;
    const void *impl = plain(tensor);
    int of_plain = impl ? plain_is(impl) : UNSEEN;
    if (of_plain != UNSEEN || (impl && FIELD(int64_t, impl, entry.layout.numel) > BRIEF) || !may_ask())
        return of_plain;
    PyObject *dtype = PyObject_GetAttr(tensor, entry.dtype_name);
    int type = 0, found = UNSEEN;
    while (type < 10 && dtype != host->dtypes[type])
        type++;
    if (dtype)
        Py_DecRef(dtype); /* they live for ever */
    PyErr_Clear();
    if (type >= 4)
        return type < 10 ? SEEN : UNSEEN;
    long long elements = asked(tensor, entry.numel_name);
    if (elements == 0)
        return SEEN;
    if (elements < 0 || elements > BRIEF || !is_true(PyObject_GetAttr(tensor, entry.host_name)))
        return UNSEEN;
    long long span = span_of(tensor, elements);
    if (span < 0 || span > BRIEF)
        return UNSEEN;
    PyObject *storage = PyObject_VectorcallMethod(entry.storage_name, &tensor, 1, NULL);
    if (storage) { /* what is not resizable is a file's memory, which may be cut off */
        long long base = asked(storage, entry.address_name), room = asked(storage, entry.nbytes_name);
        long long start = asked(tensor, entry.offset_name);
        if (is_true(PyObject_VectorcallMethod(entry.resizable_name, &storage, 1, NULL)))
            found = numbers_are(place_of(base, start, span, room, type), span, type);
        Py_DecRef(storage);
    }
    PyErr_Clear();
    return found;
}

/* Look at what a call has returned: a tensor, nothing, or a tuple of those. */
static int output_is(PyObject *output) {
    if (output == &_Py_NoneStruct)
        return SEEN;
    if (((PyObject **)output)[1] == entry.host.tensor)
        return tensor_is(output);
    if (((PyObject **)output)[1] != &PyTuple_Type || PyTuple_Size(output) > 8)
        return UNSEEN;
    for (Py_ssize_t i = 0; i < PyTuple_Size(output); i++) {
        PyObject *one = PyTuple_GetItem(output, i);
        int found = one == &_Py_NoneStruct ? SEEN : ((PyObject **)one)[1] == entry.host.tensor ? tensor_is(one) : UNSEEN;
        if (found != SEEN)
            return found;
    }
    return SEEN;
}

/* The versions of what a call is given, where that is one tensor; else NULL, with no exception set. */
static PyObject *version_of(PyObject *const *args, Py_ssize_t count, PyObject *names) {
    if (count != 2 || names || ((PyObject **)args[1])[1] != entry.host.tensor)
        return NULL;
    const void *impl = plain(args[1]);
    if (!impl && !may_ask())
        return NULL;
    PyObject *version = impl ? version_in(impl) : PyObject_GetAttr(args[1], entry.version_name);
    if (!version)
        PyErr_Clear();
    return version;
}

/* Have Python look at a call that has returned something bad, or anything after something bad. `before`: see `version_of`.
 * -1: an exception is set, a signal handler's or one that a plugin has for the training. */
static int checked(Count *counted, PyObject *state, PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject *output,
                   PyObject *before) {
    int found = entry.alert ? BAD : output_is(output);
    if (found == UNSEEN)
        entry.unseen[counted->shape] = 1, entry.passed++;
    if (found != BAD)
        return 0;
    PyObject *given[7] = {NULL, state, counted->module, NULL, NULL, output, before ? before : &_Py_NoneStruct};
    PyObject *done = with_packed(state, entry.host.suspect, given, 6, 3, args, count, names);
    if (done)
        Py_DecRef(done);
    return done ? 0 : -1;
}

/* In a metered step the recorder has all calls. -1: an exception is set, a signal handler's. */
static int recorded(PyObject *state, PyObject *cell, size_t beat) {
    PyObject *step = PyFloat_FromDouble(entry.host.cells[beat + entry.host.phase]);
    if (!step) {
        PyErr_Clear();
        return 0;
    }
    PyObject *given[4] = {NULL, entry.kind, cell, step};
    PyObject *done = asking(state, entry.host.record, given + 1, 3);
    Py_DecRef(step);
    if (done)
        Py_DecRef(done);
    return done ? 0 : -1;
}

/* Whether a module is on a stack `(module, what it is inside of, number)`: its time is part of that of the call there. */
static int is_inside(PyObject *top, PyObject *module) {
    for (; top != &_Py_NoneStruct; top = PyTuple_GetItem(top, 1))
        if (PyTuple_GetItem(top, 0) == module)
            return 1;
    return 0;
}

/* Call a module that is inside of another observed one, and count it: what its plan does where no Python function listens. */
static PyObject *counting(Count *counted, PyObject *state, PyObject *const *args, size_t nargsf, PyObject *names) {
    const Host *host = &entry.host;
    int is_metered = entry.metered;
    int64_t begun = is_metered ? now() : 0;
    uintptr_t key = (uintptr_t)args[0];
    uint64_t number = counted->number;
    PyObject *module = counted->module, *cell = counted->cell;
    Py_IncRef(state), Py_IncRef(module), Py_IncRef(module), Py_IncRef(cell);
    /* A new tuple may collect garbage up to CPython 3.11, which may run any code: `counted` may be gone after it. */
    PyObject *mine = PyTuple_New(3), **top = at(state, host->top), *outer = *top;
    counted = mine ? still(key, number) : NULL;
    if (!counted) {
        Py_DecRef(state), Py_DecRef(module), Py_DecRef(module), Py_DecRef(cell);
        if (mine)
            Py_DecRef(mine);
        return mine ? through(state, args, nargsf, names) : NULL;
    }
    Py_IncRef(outer);
    PyTuple_SetItem(mine, 0, module), PyTuple_SetItem(mine, 1, outer), PyTuple_SetItem(mine, 2, cell);
    *top = mine; /* what it held of `outer` is ours now */
    PyObject *before = counted->checks && entry.checks ? version_of(args, (Py_ssize_t)(nargsf & ~OFFSET), names) : NULL;
    size_t beat = (size_t)PyLong_AsLongLong(*at(state, host->beat));
    long long inner = PyLong_AsLongLong(*at(state, host->inner));
    host->cells[beat] = counted->value;
    int is_left = 0;
    if (is_metered) {
        entry.spent += now() - begun;
        is_left = recorded(state, cell, beat); /* which `mine` keeps */
    }
    int64_t started = now();
    PyObject *result = is_left ? NULL : through(state, args, nargsf, names);
    int64_t ended = now();
    counted = still(key, number);
    if (!result && counted)
        left(state, outer, module);
    set_to(top, outer);
    if (result && counted) {
        host->cells[beat] = PyFloat_AsDouble(PyTuple_GetItem(outer, 2));
        long long now_inner = PyLong_AsLongLong(*at(state, host->inner)), elapsed = ended - started;
        int is_again = counted->count && is_inside(outer, module);
        for (size_t i = 0; i < counted->count; i++) {
            Totals *totals = &counted->totals[i];
            if (totals->seconds && !is_again)
                *totals->seconds += (double)elapsed * 1e-9;
            if (totals->own)
                *totals->own += (double)(elapsed - now_inner + inner) * 1e-9;
            if (totals->calls)
                *totals->calls += 1.0;
        }
        if (counted->count)
            set_to(at(state, host->inner), PyLong_FromLongLong(inner + elapsed));
        Py_ssize_t given = (Py_ssize_t)(nargsf & ~OFFSET);
        int is_ended = counted->remembers && remembered(state, module, args, given, names, result);
        counted = is_ended ? NULL : still(key, number); /* what is remembered may run any code */
        if (counted && counted->checks && entry.checks)
            is_ended = checked(counted, state, args, given, names, result, before);
        if (is_ended) {
            Py_DecRef(result);
            result = NULL;
        }
        if (is_metered)
            entry.spent += now() - ended;
    }
    if (before)
        Py_DecRef(before);
    Py_DecRef(module);
    Py_DecRef(state);
    return result;
}

/* Whether a call may be counted here. One that is inside of no other, or in a backward, has more to do; one that a plugin
 * makes is none of the training's. */
static int may_count(const Count *counted, PyObject *state) {
    const Host *host = &entry.host;
    return counted && state && !entry.armed[counted->shape] && *at(state, host->top) != &_Py_NoneStruct &&
           *at(state, host->busy) == &_Py_FalseStruct && *at(state, host->backwards) == entry.zero;
}

/* Whether so few levels are left that a call of hookd's could end in a RecursionError, which would be the training's. */
static int is_near_limit(void) {
    const Depth *depth = &entry.depth;
    if (!depth->offset)
        return 0;
    int found = *(const int *)((const char *)PyThreadState_Get() + depth->offset);
    return (depth->is_counted_up ? depth->limit - found : found) < depth->room;
}

/* Whether a call is so deep in the stack that what hookd takes of it could be missing in the end: half a kilobyte for each observed call.
 * The outermost one notes where the stack is, and whether a profiler listens: to ask at each call would be dear. */
static int is_deep(PyObject *state) {
    const Host *host = &entry.host;
    if (!state)
        return 0;
    long long now = (long long)(uintptr_t)__builtin_frame_address(0);
    if (*at(state, host->top) != &_Py_NoneStruct)
        return PyLong_AsLongLong(*at(state, host->base)) - now > STACK;
    set_to(at(state, host->base), PyLong_FromLongLong(now));
    PyObject *profiled = is_profiled() ? &_Py_TrueStruct : &_Py_FalseStruct;
    Py_IncRef(profiled);
    set_to(at(state, host->profiled), profiled);
    return 0;
}

static PyObject *enter(PyObject *function, PyObject *const *args, size_t nargsf, PyObject *names) {
    Py_ssize_t count = (Py_ssize_t)(nargsf & ~OFFSET);
    PyObject *state = here(), *result; /* before a slot is found: what that runs may move it */
    if (!entry.slots || count < 1) /* taken out while a caller had fetched the field; or called without a module */
        return entry.standard(function, args, nargsf, names);
    Slot *slot = find((uintptr_t)args[0]);
    int is_observed = !slot || slot->plan, is_last = is_observed && is_near_limit();
    if (is_observed && !is_last && is_deep(state)) {
        entry.deep++;
        return entry.standard(function, args, nargsf, names); /* a jump: it takes nothing of the stack */
    }
    entry.inside++;
    if (is_last) /* one level less than without hookd: that makes up for what the outermost call takes */
        entry.deep++, result = through(state, args, nargsf, names);
    else if (!is_observed)
        result = through(state, args, nargsf, names);
    else if (slot && may_count(slot->counted, state))
        result = counting(slot->counted, state, args, nargsf, names);
    else if (slot && entry.metered && slot->metered)
        result = planned(state, slot->metered, args, count, names);
    else
        result = planned(state, slot ? slot->plan : entry.missing, args, count, names);
    entry.inside--;
    return result;
}

/* The field of a function: the word that holds what `PyVectorcall_Function` returns, behind the object's head. */
static Vectorcall *field(PyObject *function, size_t size) {
    Vectorcall now = PyVectorcall_Function(function);
    Vectorcall *words = (Vectorcall *)function;
    for (size_t at = 2; at < size / sizeof *words; at++)
        if (words[at] == now)
            return &words[at];
    return NULL;
}

static int set(PyObject *function, size_t size, Vectorcall to) {
    if (PyFunction_SetVectorcall) { /* tells specialised call sites as well */
        PyFunction_SetVectorcall(function, to);
        return 0;
    }
    Vectorcall *place = field(function, size);
    if (!place)
        return -1;
    *place = to;
    return 0;
}

static int grown(size_t size) {
    Slot *slots = PyMem_RawCalloc(size, sizeof *slots), *old = entry.slots;
    if (!slots)
        return -1;
    size_t count = old ? entry.mask + 1 : 0;
    entry.slots = slots, entry.mask = size - 1, entry.filled = entry.present;
    for (size_t i = 0; i < count; i++)
        if (old[i].key > 1) {
            size_t at = hash(old[i].key) & entry.mask;
            while (slots[at].key)
                at = (at + 1) & entry.mask;
            slots[at] = old[i];
        }
    PyMem_RawFree(old);
    return 0;
}

/* Return the number of what is offered here, for who loads it. */
EXPORTED int hookd_entry_version(void) { return VERSION; }

/* Prepare to enter `call`. `plain` is any Python function that nobody has touched.
 * -1: somebody else has replaced the entry of `call`, or there is no memory. */
EXPORTED int hookd_entry_start(PyObject *call, PyObject *plain, PyObject *missing, PyObject *impl) {
    entry.standard = PyVectorcall_Function(plain);
    if (PyVectorcall_Function(call) != entry.standard)
        return -1;
    entry.compiled = PyUnicode_InternFromString("_compiled_call_impl");
    if (!entry.compiled || grown(LEAST))
        return -1;
    Py_IncRef(entry.missing = missing);
    Py_IncRef(entry.impl = impl);
    return 0;
}

/* Enter a Python function here. -1: somebody else has replaced its entry, or there is no such field. */
EXPORTED int hookd_entry_watch(PyObject *function, size_t size) {
    if (PyVectorcall_Function(function) != entry.standard || set(function, size, enter))
        return -1;
    entry.watched = 1;
    return 0;
}

/* Put a function's own entry back. -1: it has another one than ours, which stays. */
EXPORTED int hookd_entry_unwatch(PyObject *function, size_t size) {
    if (PyVectorcall_Function(function) == enter && !set(function, size, entry.standard))
        entry.watched = 0;
    return -entry.watched;
}

static void uncounted(Slot *slot) {
    Count *counted = slot->counted;
    slot->counted = NULL;
    if (counted) {
        Py_DecRef(counted->module);
        Py_DecRef(counted->cell);
        PyMem_RawFree(counted);
    }
}

/* Set what a slot has. What dies by that may run any code, after which the slot may be somewhere else. */
static void put(Slot *slot, uintptr_t key, PyObject *plan) {
    PyObject *old = slot->plan, *metered = slot->metered;
    if (plan)
        Py_IncRef(plan);
    slot->key = key, slot->plan = plan, slot->metered = NULL;
    uncounted(slot);
    if (old)
        Py_DecRef(old);
    if (metered)
        Py_DecRef(metered);
}

/* Set a module's plan; NULL: it is called straight through. -1: no memory. */
EXPORTED int hookd_entry_put(uintptr_t key, PyObject *plan) {
    size_t size = entry.mask + 1; /* half of it stays free; of what is filled, much may be gone */
    if (2 * (entry.filled + 1) > size && grown(4 * entry.present < size ? size : 2 * size))
        return -1;
    size_t at = hash(key) & entry.mask;
    while (entry.slots[at].key && entry.slots[at].key != key)
        at = (at + 1) & entry.mask;
    if (!entry.slots[at].key)
        entry.filled++, entry.present++;
    put(&entry.slots[at], key, plan);
    return 0;
}

/* Count the calls of a module that has a plan here, while no Python function listens to those of its shape. `cells` has
 * three indices for each of `count` totals, -1 where one is not wanted. -1: no memory. */
EXPORTED int hookd_entry_count(uintptr_t key, PyObject *module, PyObject *cell, size_t shape, int remembers, int checks,
                               size_t count, const int64_t *cells) {
    Slot *slot = find(key);
    if (!slot || !entry.counts || shape >= SHAPES)
        return 0;
    Count *counted = PyMem_RawCalloc(1, sizeof *counted + count * sizeof *counted->totals);
    if (!counted)
        return -1;
    *counted = (Count){++entry.numbers, module, cell, PyFloat_AsDouble(cell), shape, remembers, checks, count};
    Py_IncRef(module);
    Py_IncRef(cell);
    for (size_t i = 0; i < count; i++, cells += 3) {
        double *of[3];
        for (size_t j = 0; j < 3; j++)
            of[j] = cells[j] < 0 ? NULL : entry.host.cells + cells[j];
        counted->totals[i] = (Totals){of[0], of[1], of[2]};
    }
    uncounted(slot);
    slot->counted = counted;
    return 0;
}

/* Set a module's plan in metered steps, where it has one for all others. Two frames less a call: the one would look for the
 * other, and call it. */
EXPORTED int hookd_entry_put_metered(uintptr_t key, PyObject *plan) {
    Slot *slot = find(key);
    if (!slot || !slot->plan)
        return 0;
    PyObject *old = slot->metered;
    Py_IncRef(slot->metered = plan);
    if (old)
        Py_DecRef(old);
    return 0;
}

/* Copy the beginning of the calling thread's state in the interpreter: `count` numbers. */
EXPORTED int hookd_entry_look(int *into, size_t count) {
    const int *from = PyThreadState_Get();
    for (size_t i = 0; i < count; i++)
        into[i] = from[i];
    return 0;
}

/* Let calls pass that have fewer than `room` levels left. */
EXPORTED int hookd_entry_depth(size_t offset, int is_counted_up, int limit, int room) {
    entry.depth = (Depth){offset, is_counted_up, limit, room};
    return 0;
}

/* Return how many calls have passed for that since the last time. */
EXPORTED int hookd_entry_deep(void) {
    long deep = entry.deep;
    entry.deep = 0;
    return deep > 1 << 30 ? 1 << 30 : (int)deep;
}

/* Whether a Python function listens to the calls of a shape. */
EXPORTED int hookd_entry_arm(size_t shape, int is_armed) {
    if (shape < SHAPES)
        entry.armed[shape] = is_armed != 0;
    return 0;
}

/* Whether what calls return is looked at from here on, and whether all of it is told. Return how many calls have passed since the last
 * time that nobody could look at. */
EXPORTED int hookd_entry_check(int checks, int alert) {
    long passed = entry.passed;
    entry.checks = checks && entry.host.gate, entry.alert = alert, entry.passed = 0;
    return passed > 1 << 30 ? 1 << 30 : (int)passed;
}

/* Read plain tensors by this layout from now on. */
EXPORTED int hookd_entry_layout(const Layout *layout) {
    entry.layout = *layout;
    return 0;
}

/* Store what is read of a plain tensor: its version, its elements, and what `plain_is` finds. -1: it is none, and would be asked. */
EXPORTED int hookd_entry_read(PyObject *tensor, int64_t *into) {
    const void *impl = plain(tensor), *version = impl ? FIELD(void *, impl, entry.layout.version) : NULL;
    if (!version)
        return -1;
    into[0] = FIELD(uint32_t, version, entry.layout.count);
    into[1] = FIELD(int64_t, impl, entry.layout.numel);
    into[2] = plain_is(impl);
    return 0;
}

typedef struct { /* plain tensors of one type, to be looked at together */
    const void **places;
    int64_t *counts, elements;
    Py_ssize_t size;
    int type;
} Numbers;

static int begun(Numbers *numbers, Py_ssize_t most) {
    *numbers = (Numbers){PyMem_RawCalloc(most > 0 ? (size_t)most : 1, sizeof *numbers->places + sizeof *numbers->counts)};
    numbers->counts = (int64_t *)(numbers->places + (most > 0 ? most : 1));
    return numbers->places != NULL && entry.host.largest;
}

/* Whether a tensor is of the same type as those before it, and can be read. */
static int added(Numbers *numbers, const void *impl) {
    int type = type_of(impl);
    int64_t count = FIELD(int64_t, impl, entry.layout.numel);
    const void *place = type < 4 && count > 0 && (!numbers->size || type == numbers->type) ? numbers_of(impl, type) : NULL;
    if (!place)
        return 0;
    numbers->places[numbers->size] = place, numbers->counts[numbers->size++] = count;
    numbers->type = type, numbers->elements += count;
    return 1;
}

/* Append the storage of a tensor, which keeps what is read there. */
static int keep(PyObject *kept, PyObject *tensor) {
    PyObject *storage = PyObject_VectorcallMethod(entry.storage_name, &tensor, 1, NULL);
    int is_kept = storage && !PyList_Append(kept, storage);
    if (storage)
        Py_DecRef(storage);
    return is_kept;
}

/* Store the largest magnitude, NaN if there is one. `kept` has the storages where the lock is to be let go meanwhile. */
static void look(const Numbers *numbers, PyObject *kept, double *into) {
    const Host *host = &entry.host;
    void *thread = kept ? PyEval_SaveThread() : NULL;
    *into = host->largest(numbers->places, numbers->counts, (int)numbers->size, numbers->type, (int)host->level);
    if (thread)
        PyEval_RestoreThread(thread);
}

/* The gradient of a parameter; `nothing`: it has none. NULL: it has to be asked. */
static const void *gradient_of(PyObject *parameter) {
    const Layout *layout = &entry.layout;
    const PyObject *type = ((PyObject **)parameter)[1];
    const void *impl = layout->impl && (type == entry.host.tensor || type == entry.host.parameter) ? FIELD(void *, parameter, layout->impl) : NULL;
    const void *meta = impl ? FIELD(void *, impl, layout->autograd) : NULL;
    return !impl ? NULL : meta ? FIELD(void *, meta, layout->grad) : (const void *)layout->nothing;
}

/* Look at all tensors of a list, or at the gradients of all parameters of one; store the largest magnitude in them, NaN if there is one.
 * Return how many there are; -1: not all are plain ones of one type, and they have to be asked. */
EXPORTED int hookd_entry_largest(PyObject *list, int of_gradients, double *into) {
    Py_ssize_t size = PyList_Size(list);
    Numbers numbers;
    int is_right = begun(&numbers, size);
    for (Py_ssize_t i = 0; i < size && is_right; i++) {
        PyObject *one = PyList_GetItem(list, i);
        const void *impl = of_gradients ? gradient_of(one) : plain(one);
        if (!of_gradients || impl != (const void *)entry.layout.nothing)
            is_right = impl && FIELD(uint64_t, impl, entry.layout.keys) == entry.layout.plain && added(&numbers, impl);
    }
    PyObject *kept = NULL;
    if (is_right && numbers.elements > TOGETHER) {
        is_right = may_ask() && (kept = PyList_New(0));
        for (Py_ssize_t i = 0; i < size && is_right; i++) {
            PyObject *one = PyList_GetItem(list, i), *tensor = of_gradients ? PyObject_GetAttr(one, entry.grad_name) : one;
            is_right = tensor && (tensor == &_Py_NoneStruct || keep(kept, tensor));
            if (tensor && of_gradients)
                Py_DecRef(tensor);
        }
        PyErr_Clear();
    }
    *into = 0.0;
    if (is_right && numbers.size)
        look(&numbers, kept, into);
    if (kept)
        Py_DecRef(kept);
    PyMem_RawFree(numbers.places);
    return is_right ? (int)numbers.size : -1;
}

/* Whether something of a shape could not be looked at, ever. */
EXPORTED int hookd_entry_unseen(size_t shape) { return shape >= SHAPES || entry.unseen[shape]; }

/* Whether the calls from here on are metered. */
EXPORTED int hookd_entry_meter(int is_metered) {
    entry.metered = is_metered;
    return 0;
}

/* Store what metered calls have taken since the last time, in ns. */
EXPORTED int hookd_entry_spent(int64_t *spent) {
    *spent = entry.spent;
    entry.spent = 0;
    return 0;
}

/* Count calls from now on with what `host` has. */
EXPORTED int hookd_entry_host(const Host *host) {
    entry.host = *host;
    PyObject *given[] = {host->local, host->unwind, host->remember, host->record, host->suspect, host->tensor, host->parameter, host->whole, host->modes,
                         host->tracing, host->profile, host->tool};
    for (size_t i = 0; i < sizeof given / sizeof *given; i++)
        if (given[i])
            Py_IncRef(given[i]);
    entry.kind = PyLong_FromLongLong((long long)host->kind);
    entry.zero = PyLong_FromLongLong(0);
    entry.thread_name = PyUnicode_InternFromString("thread");
    entry.version_name = PyUnicode_InternFromString("_version");
    entry.numel_name = PyUnicode_InternFromString("numel");
    const struct { PyObject **at; const char *text; } words[] = {
        {&entry.leaf_name, "is_leaf"},       {&entry.storage_name, "untyped_storage"},
        {&entry.offset_name, "storage_offset"}, {&entry.address_name, "data_ptr"},
        {&entry.nbytes_name, "nbytes"},      {&entry.resizable_name, "resizable"},
        {&entry.dtype_name, "dtype"},        {&entry.contiguous_name, "is_contiguous"},
        {&entry.host_name, "is_cpu"},        {&entry.shape_name, "shape"},
        {&entry.stride_name, "stride"},      {&entry.grad_name, "grad"},
    };
    entry.counts = entry.kind && entry.zero && entry.thread_name && entry.version_name && entry.numel_name;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        entry.counts = (*words[i].at = PyUnicode_InternFromString(words[i].text)) && entry.counts;
    if (!entry.counts)
        PyErr_Clear();
    return 0;
}

/* Keep the outputs of a list of remembered calls alive no more, and know only the last ones still. Return how many of those are left
 * to Python. What dies by that may run any code. */
EXPORTED int hookd_entry_let_go(PyObject *returned, Py_ssize_t last) {
    Py_ssize_t size = PyList_Size(returned);
    if (size > last)
        PyList_SetSlice(returned, 0, size - last, NULL);
    if (!entry.counts || !gives(entry.host.modes, entry.zero)) /* a mode would see that they are looked at */
        return (int)PyList_Size(returned);
    int left = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(returned); i++) {
        PyObject *one = PyList_GetItem(returned, i), *weak;
        if (((PyObject **)one)[1] == &PyTuple_Type && PyTuple_Size(one) == 3)
            continue; /* it is weak already */
        if (!(weak = weakly(one)))
            left++;
        else
            PyList_SetItem(returned, i, weak);
    }
    return left;
}

/* Call a function of hookd's hidden from a profiler: see hookd/target/entry/hidden.py. */
EXPORTED PyObject *hookd_entry_hidden(PyObject *function, PyObject *args, PyObject *kwargs) {
    PyObject *state = here();
    entry.inside++;
    int was_seen = hide(state);
    PyObject *result = PyObject_Call(function, args, kwargs);
    show(state, was_seen);
    entry.inside--;
    return result;
}

/* Call a function of the training's inside of that, which is hidden from nobody. */
EXPORTED PyObject *hookd_entry_aloud(PyObject *function, PyObject *args, PyObject *kwargs) {
    PyObject *state = here();
    int is_hidden = state && *at(state, entry.host.hidden) == &_Py_TrueStruct;
    entry.inside++;
    if (is_hidden) {
        Py_IncRef(state);
        show(state, 1);
    }
    PyObject *result = PyObject_Call(function, args, kwargs);
    if (is_hidden)
        suspend(state);
    entry.inside--;
    return result;
}

/* Forget a module. */
EXPORTED int hookd_entry_drop(uintptr_t key) {
    Slot *slot = find(key);
    if (slot) {
        entry.present--;
        put(slot, 1, NULL);
    }
    return 0;
}

/* Forget all modules. */
EXPORTED int hookd_entry_clear(void) {
    for (size_t i = 0; entry.slots && i <= entry.mask; i++)
        if (entry.slots[i].key > 1) {
            entry.present--;
            put(&entry.slots[i], 1, NULL);
        }
    return 0;
}

/* Give everything back. Whoever comes here still, by a field that could not be given back, is called straight through.
 * Return 1 while this file must stay loaded: for such a one, or for calls that are inside. */
EXPORTED int hookd_entry_stop(void) {
    hookd_entry_clear();
    PyMem_RawFree(entry.slots);
    entry.slots = NULL;
    entry.counts = 0;
    if (!entry.inside) { /* else they are used until the last call is over, and stay */
        const Host *host = &entry.host;
        PyObject *made[] = {host->local, host->unwind, host->remember, host->record, host->suspect, host->tensor, host->parameter, host->whole, host->modes,
                            host->tracing, host->profile, host->tool, entry.state, entry.kind, entry.zero, entry.thread_name, entry.version_name,
                            entry.numel_name, entry.leaf_name, entry.storage_name, entry.offset_name, entry.address_name,
                            entry.nbytes_name, entry.resizable_name, entry.dtype_name, entry.contiguous_name, entry.host_name,
                            entry.shape_name, entry.stride_name};
        for (size_t i = 0; i < sizeof made / sizeof *made; i++)
            if (made[i])
                Py_DecRef(made[i]);
    }
    Py_DecRef(entry.missing);
    Py_DecRef(entry.impl);
    return entry.inside || entry.watched;
}
