/* Declarations shared by the files of the entry: entry.c (the table of modules, and what happens at a call), calls.c,
 * tensors.c, graph.c, spans.c and notify.c. */
#ifndef HOOKD_ENTRY_H
#define HOOKD_ENTRY_H
#include <stddef.h>
#include <stdint.h>

/* From libc. Its headers are not available for every machine that this is compiled for: Linux's <time.h>, 64 bits. */
struct timespec { int64_t tv_sec, tv_nsec; };
enum { CLOCK_REALTIME, CLOCK_MONOTONIC };
extern int clock_gettime(int, struct timespec *);

typedef struct _object PyObject;
typedef ptrdiff_t Py_ssize_t;
typedef PyObject *(*Vectorcall)(PyObject *, PyObject *const *, size_t, PyObject *);

extern PyObject _Py_FalseStruct, _Py_NoneStruct, _Py_TrueStruct, PyMethod_Type, PyTuple_Type;
extern PyObject *PyCapsule_New(void *, const char *, void (*)(PyObject *));
extern const char *PyCapsule_GetName(PyObject *);
extern void *PyCapsule_GetPointer(PyObject *, const char *);
extern PyObject *PyCFunction_NewEx(void *, PyObject *, PyObject *);
typedef PyObject *(*Method)(PyObject *, PyObject *const *, Py_ssize_t);
extern int PyDict_Contains(PyObject *, PyObject *);
extern PyObject *PyDict_New(void);
extern Py_ssize_t PyDict_Size(PyObject *);
extern int PyDict_SetItem(PyObject *, PyObject *, PyObject *);
extern void PyErr_Clear(void);
extern void PyErr_Fetch(PyObject **, PyObject **, PyObject **);
extern PyObject *PyErr_NoMemory(void);
extern void PyErr_NormalizeException(PyObject **, PyObject **, PyObject **);
extern PyObject *PyErr_Occurred(void);
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
extern unsigned long long PyLong_AsUnsignedLongLong(PyObject *);
extern PyObject *PyLong_FromLongLong(long long);
extern PyObject *PyLong_FromUnsignedLongLong(unsigned long long);
extern PyObject *PyMethod_Function(PyObject *);
extern PyObject *PyMethod_New(PyObject *, PyObject *);
extern PyObject *PyMethod_Self(PyObject *);
extern PyObject *PyObject_Call(PyObject *, PyObject *, PyObject *);
extern PyObject *PyObject_GetAttr(PyObject *, PyObject *);
extern PyObject *PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);
extern PyObject *PyObject_VectorcallMethod(PyObject *, PyObject *const *, size_t, PyObject *);
extern int hookd_entry_listen_flows(size_t, PyObject *, int);
extern int hookd_entry_listen_calls(size_t, PyObject *, PyObject *, int);
extern void *PyThreadState_Get(void);
extern uint64_t PyThreadState_GetID(void *);
extern void PyThreadState_EnterTracing(void *) __attribute__((weak)); /* 3.11 and newer */
extern void PyThreadState_LeaveTracing(void *) __attribute__((weak));
extern PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
extern PyObject *PyTuple_New(Py_ssize_t);
extern int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *);
extern Py_ssize_t PyTuple_Size(PyObject *);
extern int PyType_IsSubtype(PyObject *, PyObject *);
extern PyObject *PyUnicode_InternFromString(const char *);
extern PyObject *PyWeakref_NewRef(PyObject *, PyObject *);
extern Vectorcall PyVectorcall_Function(PyObject *);
extern void PyFunction_SetVectorcall(PyObject *, Vectorcall) __attribute__((weak)); /* 3.12 and newer */
extern int dlclose(void *) __attribute__((weak));
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);
extern int PyObject_SetAttr(PyObject *, PyObject *, PyObject *);
extern PyObject *PyList_New(Py_ssize_t);
extern void *PyMem_RawCalloc(size_t, size_t);
extern void PyMem_RawFree(void *);
extern void *PyMem_RawRealloc(void *, size_t);
extern int Py_AddPendingCall(int (*)(void *), void *);
extern void Py_DecRef(PyObject *);
extern void Py_IncRef(PyObject *);

#define EXPORTED __attribute__((visibility("default")))
#define OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1)) /* PY_VECTORCALL_ARGUMENTS_OFFSET */
enum { VERSION = 28, LEAST = 1024, GROUPS = 256, STACK = 1 << 20, RING = 32, MOST_KNOWN = 1 << 14 };
enum { WANTS_INPUTS = 1, WANTS_VERSIONS = 2, WANTS_TIMES = 4, WANTS_IS_NESTED = 8, WANTS_QUIET = 16 }; /* `CallValues` of c_entry.py */
enum { INPUTS = 4, OUTPUTS = 8 }; /* limits of a call whose gradients are observed in C; Python handles calls with more */

typedef struct { /* the cells of the page to which each call is added; any may be NULL */
    double *seconds, *own, *calls;
    const double *standing; /* for backward passes, see hookd/api/totals.py; NULL for calls */
} Totals;
enum { STEPS, IS_ON, IS_ACTIVE, ZEROS, HAS_LOOKED }; /* the same as in hookd/api/totals.py and hookd/api/shown.py */

enum { MEAN_OF, STD_OF, MIN_OF, MAX_OF, ABSMAX_OF, NORM_OF, ZEROS_OF, NONFINITE_OF, STATISTICS, STATE = STATISTICS }; /* the same as in hookd/api/shown.py */
typedef struct { /* where a plugin shows statistics of module outputs; both arrays live as long as the plan */
    double *standing;
    const double *module; /* of one module: the cell indices of its gauges, -1 for none; at STATE, 0 unless Python has to be called */
} Shown;

typedef struct { /* a module whose calls are counted in C; calls of a group that uses plans go through the plan instead */
    uint64_t number; /* unique, never reused */
    PyObject *module, *cell;
    double value; /* value of `cell`: the module's id in a heartbeat */
    size_t group;
    int remembers, checks; /* its outputs are remembered; are checked */
    int is_away;           /* it has returned an output that could not be checked in C */
    int is_timed;          /* a listener takes the time of its calls, now or in other steps */
    size_t count, back;    /* number of totals for its calls, then for its backward */
    size_t shows;          /* number of plugins that show its outputs */
    Shown *shown;
    Totals *inferred;      /* totals for calls of inference; NULL: not known yet, so these calls go through the plan */
    size_t inferring;      /* their number */
    Totals totals[];
} Count;

typedef struct {
    uintptr_t key;  /* a module's address; 0: free; 1: was used, so the search continues */
    PyObject *plan; /* NULL: call straight through */
    Count *counted; /* NULL: the plan counts the calls */
} Slot;

typedef struct { /* the listeners to the calls of a group: lists, NULL if there are none */
    PyObject *before, *after;
    int wants;
} Listening;

typedef struct { /* one call: its listeners, and the values that they get (hookd/target/plugins/values.py) */
    PyObject *before, *after, *values;
    int wants;
} Notice;

typedef struct Probe Probe; /* see spans.c */

typedef struct { /* when the backward of a call began, and the thread's times at that moment, in ns (hookd/target/entry/threads.py) */
    int64_t started, inner, lost, recomputed;
} Since;

typedef struct { /* where the interpreter's thread state stores the recursion depth; `offset` is 0 if unknown */
    size_t offset;
    int is_counted_up, limit; /* the number is what is left of the limit, or counts up to it (CPython 3.10) */
    int room;                 /* levels that hookd may need for itself */
} Depth;

typedef struct { /* the same as `_Host` in hookd/target/entry/c_entry.py */
    PyObject *local;                 /* `local.thread` is the calling thread's state */
    PyObject *unwind;                /* called as unwind(state, outer, module, error) if an exception leaves a call */
    PyObject *remember;              /* called as remember(state, module, args, kwargs, output) if C cannot remember the output */
    PyObject *next_seq;              /* returns the number of the recorder's next record */
    PyObject *suspect;               /* called as suspect(state, module, args, kwargs, output, before), see `suspected` */
    PyObject *shown;                 /* called as shown(module, output), see `show_output` */
    PyObject *hand;                  /* called as hand(state, module, args, kwargs, output, before), see `handed` */
    PyObject *notify, *notify_plainly, *no_frame, *versions; /* of hookd/target/entry: see notify.c */
    PyObject *tensor, *parameter;    /* torch.Tensor and torch.nn.Parameter */
    PyObject *whole;                 /* a copy of torch's `_wrapped_call_impl`, whose calls are not entered */
    PyObject *modes, *tracing;       /* return 0 and None if a tensor's version may be read through Python */
    PyObject *unseen;                /* creates a guard, see `quiet` */
    PyObject *dispatching, *transforms, *autocast, *capturing; /* return 0, None, False and False in the usual state; `capturing` is NULL if torch lacks it */
    PyObject *compiler, *cuda;       /* modules that know whether torch is compiling, and whether a device may be in use */
    PyObject *graph_begins, *graph_enters, *graph_ends, *graph_adds, *graph_notifies, *graph_failed; /* of hookd/target/entry/calls.py, for graph.c */
    PyObject *hooked;                /* called as hooked(capsule, *gradients); calls the function that `hookd_entry_graph` returns */
    PyObject *grad_enabled, *sequence, *will_run; /* functions of torch */
    PyObject *task, *queue;          /* functions of torch: the number of the current backward, and one that queues a callback for its end */
    PyObject *carrier;               /* a tensor, see `put_probe`; None if this torch lacks what probes need */
    PyObject *profile, *tool;        /* return None if no profiler listens to the thread; NULL if nobody can tell */
    PyObject *dtypes[10];            /* the dtypes of kernel.c, in its order, then the integer dtypes, which are always finite */
    int (*gate)(const void *, int64_t, int, int); /* `hookd_is_finite` of kernel.c; NULL: outputs are not checked */
    double (*largest)(const void *const *, const int64_t *, int, int, int); /* `hookd_largest` of kernel.c */
    void (*summary)(const void *, int64_t, int, int, double *); /* `hookd_summary` of kernel.c */
    uint64_t (*digest)(const void *, int64_t, int, int, double *); /* `hookd_digest_extent` of kernel.c */
    size_t level;                    /* instruction set for those functions */
    double *cells;                   /* the page's cells */
    size_t phase;                    /* distance from a heartbeat's module to its step, in cells */
    size_t kind;                     /* kind of the record of a call */
    size_t ring, records;            /* where the recorder begins, in cells, and its number of records */
    size_t most, each;               /* limit of elements kept alive, and the overhead of a call, in elements */
    size_t top, busy, backwards, beat, inner, lost, recomputed, flows, kept, returned, latest, newest, hidden, base, profiled, infers; /* byte offsets in a ThreadState */
    size_t waits;                    /* offset in a hookd Module, in bytes */
} Host;

typedef struct { /* offsets of a tensor's fields in bytes, as found by hookd/target/tensors/layout.py; `impl` is 0 if unknown */
    size_t impl;                                                          /* in the Python object; the others are in the object that it points to */
    size_t keys, dtype, numel, start, contiguous, mask, storage, version; /* `mask` is the bit in the byte `contiguous` */
    size_t count;                                                         /* in the object that `version` points to */
    size_t base, nbytes, deleter;                                         /* in the object that `storage` points to */
    size_t autograd, grad;                                                /* `grad` is in the object that `autograd` points to */
    uint64_t plain, owner; /* the keys of a plain tensor in host memory, and the deleter of memory from torch's allocator */
    uint64_t nothing;      /* the value of `grad` for a tensor without a gradient */
    uint16_t dtypes[10];   /* the same order as in `Host` */
} Layout;

struct State { /* all state of the entry; one instance in the process */
    Slot *slots;
    size_t mask, filled, present; /* filled: includes the slots that were used */
    Vectorcall standard;          /* the value that a Python function has in its field by default */
    PyObject *missing;            /* called for a module that is not in the table */
    PyObject *compiled, *impl;    /* the strings "_compiled_call_impl" and "_call_impl" */
    long inside;                  /* number of calls that are in this library now, in all threads */
    int watched;                  /* a function is entered */
    Host host;                    /* its objects are kept until no call is inside */
    Layout layout;
    int counts;                   /* calls are counted in C */
    PyObject *zero, *thread_name, *version_name, *numel_name, *leaf_name, *storage_name, *offset_name, *address_name,
        *nbytes_name, *resizable_name, *dtype_name, *contiguous_name, *host_name, *shape_name, *stride_name, *grad_name,
        *node_name, *nr_name, *learns_name, *sequence_name, *following_name, *prehook_name, *hook_name, *hooks_name, *dict_name, *compiling_name, *initialized_name, *enter_name, *exit_name;
    PyObject *state;              /* of the thread that came last, whose id is `thread`; no two threads share a state */
    uint64_t thread, numbers;
    uint64_t freed;               /* number of `Count` structs that were freed */
    unsigned char uses_plans[GROUPS]; /* calls of this group go through their plans */
    Listening listening[GROUPS];  /* the Python functions that are called for calls of this group that are counted in C */
    unsigned char hands[GROUPS];  /* large outputs of this group are checked too, and Python checks those that C cannot */
    PyObject *listeners[GROUPS];  /* the listeners to gradients of calls of this group; NULL: none */
    int wants[GROUPS];            /* what these listeners need */
    long hooks;                   /* number of hooks that live in graphs */
    PyObject *large;              /* a weak reference to the last large output that was found finite; NULL: none */
    int64_t large_version;        /* its version at that time */
    Probe *last;                  /* the newest probe */
    uint64_t ordinal;             /* of the last returned call whose backward is timed */
    uint64_t first, first_thread; /* number of the outermost call's first node, as far as known, and the thread that it belongs to */
    void *handle;                 /* of this library, to be closed when the last hook is gone; NULL: not yet */
    int64_t hooked;               /* ns spent in graph.c in a metered step, without those that Python charges */
    int metered;
    int checks;                   /* outputs are checked, and `suspect` is called for bad ones */
    int alert;                    /* `suspect` is called for all outputs */
    long passed;                  /* number of calls for which `suspect` might have been called, but whose output nobody could check */
    int64_t spent;                /* ns spent in this library and in functions of hookd's that it calls, in a metered step */
    int64_t shown;                /* ns spent showing outputs */
    int64_t looked;               /* ns spent checking large outputs */
    int64_t charged;              /* ns spent in functions called for these purposes that Python itself charges */
    Depth depth;
    long deep;                    /* number of calls too near the recursion limit or too deep in the stack to be observed */
};

#pragma GCC visibility push(hidden)
extern struct State entry;

static inline PyObject **at(PyObject *object, size_t offset) { return (PyObject **)((char *)object + offset); }

#define FIELD(type, object, offset) (*(const type *)((const char *)(object) + (offset)))
#define TYPE(object) (((PyObject **)(object))[1])

/* calls.c */
PyObject *asking(PyObject *state, PyObject *function, PyObject *const *given, size_t count);
int gives(PyObject *function, PyObject *expected);
PyObject *here(void);
PyObject *method(const char *name, Method call);
int hide(PyObject *state);
int is_profiled(void);
void left(PyObject *state, PyObject *outer, PyObject *module);
int64_t now(void);
PyObject *named(PyObject *const *values, PyObject *names);
PyObject *packed(PyObject *const *args, Py_ssize_t count);
PyObject *planned(PyObject *state, PyObject *plan, PyObject *const *args, Py_ssize_t count, PyObject *names);
void set_to(PyObject **place, PyObject *value);
void show(PyObject *state, int was_seen);
void suspend(PyObject *state);
PyObject *through(PyObject *state, PyObject *const *args, size_t nargsf, PyObject *names);
PyObject *with_packed(PyObject *state, PyObject *function, PyObject **given, size_t size, size_t place, PyObject *const *args,
                      Py_ssize_t count, PyObject *names);

/* tensors.c */
enum { SEEN, MASKED, BAD, UNSEEN }; /* of a tensor: all finite; some -inf, the rest finite; an infinity or a NaN; unknown */
int looked_at(PyObject *output, int hands);
int handed(PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject *output, PyObject *before);
int show_output(Count *counted, PyObject *state, PyObject *module, PyObject *output);
int suspected(PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject *output, PyObject *before);
int is_finite(PyObject *tensor);
PyObject *largest_of(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *let_go(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *digest_of(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *only_number(PyObject *self, PyObject *const *args, Py_ssize_t count);
int may_ask(void);
PyObject *quiet(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *leave(PyObject *self, PyObject *const *args, Py_ssize_t count);
const void *plain(PyObject *tensor);
int remembered(PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject *output, int found);
PyObject *version_of(PyObject *const *args, Py_ssize_t count, PyObject *names);
int versions_of(PyObject *state, PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject **versions);

/* entry.c */
void add_to(const Totals *totals, double times, int64_t elapsed, int64_t self);
Count *still(uintptr_t key, uint64_t number);

/* graph.c */
enum { HEARS_BEFORE = 1, HEARS = 2, CHECKS_BEFORE = 4, CHECKS = 8, KEEPS_OUT = 16, KEEPS_IN = 32, TIMED = 64, WALKS = 128, ADDS = 256 };
/* What listeners need of gradients; the same as `Gradients` in hookd/target/entry/c_entry.py. HEARS_BEFORE, HEARS: to
 * be called for gradients that enter, or that leave; CHECKS_BEFORE, CHECKS: only unless all are finite. KEEPS_OUT,
 * KEEPS_IN: the gradients themselves. TIMED: the time. WALKS: the nodes of the module must be found, for listeners to
 * gradients that leave or to the time. ADDS: the time is added up. */
typedef struct Flow Flow;
typedef struct { /* the edge of an input in the graph; NULL: the input needs no gradient */
    PyObject *node;
    long long nr;
} Edge;
typedef struct { /* the state of the graph when a call begins */
    PyObject *listeners;   /* to gradients; NULL: nothing is to be hooked */
    PyObject *entered; /* the state that Python has noted; NULL: the other fields have it */
    int wants, count;
    int is_probed; /* spans.c handles the call */
    uint64_t sequence;
    int64_t lost; /* value of `lost` in the thread's state */
    Edge edges[INPUTS];
} Begun;
int graph_begins(Begun *begun, size_t group, PyObject *state, PyObject *const *args, Py_ssize_t count);
int graph_ends(Begun *begun, PyObject *state, PyObject *module, uint64_t number, PyObject *const *args, Py_ssize_t count, PyObject *output);
void graph_forgets(Begun *begun);
PyObject *walk_from(PyObject *self, PyObject *const *args, Py_ssize_t count);
uint64_t number_of(PyObject *node);
void dropped_one(void);

/* notify.c */
int notify_after(const Notice *notice, PyObject *state, PyObject *output, int64_t elapsed, int64_t self, int is_nested);
int notify_before(Notice *notice, size_t group, PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names);
void forget_notice(const Notice *notice);

/* spans.c */
int spans_begin(Begun *begun, PyObject *state, PyObject *const *args, Py_ssize_t count);
int spans_end(const Begun *begun, PyObject *state, PyObject *node, uint64_t at, uintptr_t key, uint64_t number);
int spans_called(PyObject *capsule, PyObject *state, int64_t now_ns);
void spans_close(PyObject *state, uintptr_t thread, uint64_t low, uint64_t ordinal, int64_t now_ns);
void spans_outermost(PyObject *state);
int spans_since(PyObject *state, uintptr_t thread, uint64_t low, uint64_t ordinal, Since *since);
void spans_stop(void);

#pragma GCC visibility pop
#endif
