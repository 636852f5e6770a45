/* What the files of the entry have in common: entry.c (the table, and what a call comes to), calls.c, tensors.c and graph.c. */
#ifndef HOOKD_ENTRY_H
#define HOOKD_ENTRY_H
#include <stddef.h>
#include <stdint.h>

/* Of libc, whose headers are not there for every machine that this is compiled for: <time.h> of Linux, 64 bits. */
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
extern int hookd_entry_hear(size_t, PyObject *, int);
extern int hookd_entry_tell(size_t, PyObject *, PyObject *, int);
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
enum { VERSION = 22, LEAST = 1024, SHAPES = 256, STACK = 1 << 20, RING = 32, MOST_KNOWN = 1 << 14 };
enum { WANTS_INPUTS = 1, WANTS_VERSIONS = 2, WANTS_TIMES = 4, WANTS_IS_AGAIN = 8, WANTS_QUIET = 16 }; /* Python functions of a call, as `Wanted` of hookd/target/entry/c_entry.py */
enum { INPUTS = 4, OUTPUTS = 8 }; /* of a call whose gradients are seen here; one with more is left to Python */

typedef struct { /* the cells of a page to which each call is added; any may be NULL */
    double *seconds, *own, *calls;
    const double *standing; /* of backward passes, as hookd/api/totals.py has it; NULL: of calls */
} Totals;
enum { STEPS, IS_ON, IS_ACTIVE, ZEROS, HAS_LOOKED }; /* as hookd/api/totals.py and hookd/api/shown.py have them */

enum { MEAN_OF, STD_OF, MIN_OF, MAX_OF, ABSMAX_OF, NORM_OF, ZEROS_OF, NONFINITE_OF, STATISTICS, STATE = STATISTICS }; /* as hookd/api/shown.py has them */
typedef struct { /* where a plugin shows what modules return; both live as long as the plan */
    double *standing;
    const double *module; /* of one module: the cells, by number, of its gauges, -1 where there is none; at STATE, 0: nothing is to be told of it */
} Shown;

typedef struct { /* of a module whose calls are counted here, as long as no Python function of a plugin listens to them */
    uint64_t number; /* no other one has had it */
    PyObject *module, *cell;
    double value; /* that of `cell`: the module in a heartbeat */
    size_t shape;
    int remembers, checks; /* what it returns is kept; is looked at */
    int is_away;           /* it has returned what could not be looked at here */
    int is_timed;          /* somebody wants the time of its calls, now or in other steps */
    size_t count, back;    /* so many totals of its calls, and then of its backward */
    size_t shows;          /* so many plugins show what it returns */
    Shown *shown;
    Totals totals[];
} Count;

typedef struct {
    uintptr_t key;  /* a module's address; 0: free, 1: was used, and the search goes on */
    PyObject *plan; /* NULL: call straight through */
    Count *counted; /* NULL: the plan counts */
} Slot;

typedef struct { /* who listens to the calls of a shape: lists, NULL where nobody does */
    PyObject *before, *after;
    int wants;
} Listening;

typedef struct { /* of one call: who is told, and of what (hookd/target/plugins/values.py) */
    PyObject *before, *after, *values;
    int wants;
} Told;

typedef struct Mark Mark; /* see marks.c */

typedef struct { /* when a backward of a call began, and what its thread had spent by then, ns (hookd/target/entry/threads.py) */
    int64_t started, inner, lost, again;
} Since;

typedef struct { /* where a thread's state in the interpreter has its depth of calls; `offset` is 0 where that is not known */
    size_t offset;
    int is_counted_up, limit; /* it is what is left of the limit, or counts up to it (CPython 3.10) */
    int room;                 /* so many levels hookd may need for itself */
} Depth;

typedef struct { /* as hookd/target/entry/c_entry.py `_Host` has it */
    PyObject *local;                 /* `local.thread` is the calling thread's state */
    PyObject *unwind;                /* called as unwind(state, outer, module, error) where a call is left by an exception */
    PyObject *remember;              /* as remember(state, module, args, kwargs, output) where this file cannot */
    PyObject *next_seq;              /* returns the number of the recorder's next record */
    PyObject *suspect;               /* as suspect(state, module, args, kwargs, output, before): see `suspected` */
    PyObject *shown;                 /* as shown(module, output): see `show_output` */
    PyObject *hand;                  /* as hand(state, module, args, kwargs, output, before): see `handed` */
    PyObject *tell, *tell_plainly, *no_frame, *versions; /* of hookd/target/entry: see told.c */
    PyObject *tensor, *parameter;    /* torch.Tensor and torch.nn.Parameter */
    PyObject *whole;                 /* torch's `_wrapped_call_impl` as a function of its own, which is not entered */
    PyObject *modes, *tracing;       /* return 0 and None where a tensor may be asked for its version */
    PyObject *unseen;                /* makes a guard: see `quiet` */
    PyObject *dispatching, *transforms, *autocast, *capturing; /* return 0, None, False and False in what is usual; the last is NULL where torch has none */
    PyObject *compiler, *cuda;       /* modules: torch compiles; a device may be in use */
    PyObject *graph_begins, *graph_enters, *graph_ends, *graph_adds, *graph_told, *graph_failed; /* of hookd/target/entry/calls.py, for graph.c */
    PyObject *hooked;                /* as hooked(capsule, *gradients): calls what `hookd_entry_graph` returns */
    PyObject *grad_enabled, *sequence, *will_run; /* torch's */
    PyObject *task, *queue;          /* likewise: the number of the backward that is under way, and what has a function called at its end */
    PyObject *carrier;               /* a tensor: see `marked`; None: torch has not what marks need */
    PyObject *profile, *tool;        /* return None where no profiler listens to the thread; NULL: nobody can say */
    PyObject *dtypes[10];            /* those of kernel.c, in its order, and then whole numbers, which are all finite */
    int (*gate)(const void *, int64_t, int, int); /* `hookd_is_finite` of kernel.c; NULL: nothing is looked at */
    double (*largest)(const void *const *, const int64_t *, int, int, int); /* `hookd_largest` of it */
    void (*summary)(const void *, int64_t, int, int, double *); /* `hookd_summary` of it */
    size_t level;                    /* its instructions */
    double *cells;                   /* of the page */
    size_t phase;                    /* from a heartbeat's module to its step, in cells */
    size_t kind;                     /* of the record of a call */
    size_t ring, records;            /* where the recorder begins, in cells, and how many it has */
    size_t most, each;               /* elements that are kept alive, and what a call counts beside its own */
    size_t top, busy, backwards, beat, inner, lost, again, flows, kept, returned, latest, newest, hidden, base, profiled; /* where the thread's state has them, in bytes */
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

struct State { /* all of it; one for the process */
    Slot *slots;
    size_t mask, filled, present; /* filled: with those that were used */
    Vectorcall standard;          /* what a Python function has in the field by itself */
    PyObject *missing;            /* called for a module that is not in the table */
    PyObject *compiled, *impl;    /* the strings "_compiled_call_impl" and "_call_impl" */
    long inside;                  /* calls that are in this file now, in all threads */
    int watched;                  /* a function is entered here */
    Host host;                    /* its objects live until no call is inside any more */
    Layout layout;
    int counts;                   /* calls are counted here */
    PyObject *zero, *thread_name, *version_name, *numel_name, *leaf_name, *storage_name, *offset_name, *address_name,
        *nbytes_name, *resizable_name, *dtype_name, *contiguous_name, *host_name, *shape_name, *stride_name, *grad_name,
        *node_name, *nr_name, *learns_name, *sequence_name, *following_name, *prehook_name, *hook_name, *hooks_name, *dict_name, *compiling_name, *initialized_name, *enter_name, *exit_name;
    PyObject *state;              /* of the thread that came last, whose number is `thread`; no two threads have one */
    uint64_t thread, numbers;
    uint64_t freed;               /* so many `Count` are gone */
    unsigned char armed[SHAPES];  /* calls of this shape go through their plans */
    Listening listening[SHAPES];  /* the Python functions that are told of the calls of this shape which are counted here */
    unsigned char hands[SHAPES];  /* large outputs of this shape are looked at as well, and what cannot be is handed to Python */
    PyObject *heard[SHAPES];      /* who listens to the gradients of calls of this shape; NULL: nobody */
    int wants[SHAPES];            /* what of them */
    long hooks;                   /* that live in graphs */
    PyObject *large;              /* a weak reference to the large output that was found finite last; NULL: there is none */
    int64_t large_version;        /* its version then */
    Mark *last;                   /* the last mark that was made */
    uint64_t turn;                /* in which the last call returned whose backward is timed */
    uint64_t first, first_thread; /* the number of the first node of the outermost call, as far as is known, and the thread's that it is of */
    void *handle;                 /* of this file, to be closed when the last of them is gone; NULL: not yet */
    int64_t hooked;               /* ns of a metered step in graph.c, without what is charged by Python */
    int metered;
    int checks;                   /* what calls return is looked at, and `suspect` is told */
    int alert;                    /* it is told of all of them */
    long passed;                  /* calls of which it should have been told, and nobody could look */
    int64_t spent;                /* ns of a metered step in this file, and in what it calls of hookd */
    int64_t shown;                /* and to show what calls return */
    int64_t looked;               /* and to look at large ones */
    int64_t charged;              /* in what is called for that, which Python charges itself */
    Depth depth;
    long deep;                    /* calls so near to the limit that they were not observed */
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
enum { SEEN, MASKED, BAD, UNSEEN }; /* of a tensor: all is finite; or -inf; there is an infinity or a NaN; nobody can say */
int looked_at(PyObject *output, int hands);
int handed(PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject *output, PyObject *before);
int show_output(Count *counted, PyObject *state, PyObject *module, PyObject *output);
int suspected(PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject *output, PyObject *before);
int is_finite(PyObject *tensor);
PyObject *largest_of(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *let_go(PyObject *self, PyObject *const *args, Py_ssize_t count);
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
/* What is wanted of gradients, as `Gradients` of hookd/target/entry/c_entry.py: to be told of those that enter or that leave, or only of those
 * that are not finite; to see them; to have the time; whether anything is wanted of those that leave, or of the time; and to have that added up. */
typedef struct Flow Flow;
typedef struct { /* where an input came from in the graph; NULL: it needs no gradient */
    PyObject *node;
    long long nr;
} Edge;
typedef struct { /* what is known when a call begins */
    PyObject *heard;   /* who listens; NULL: nothing is to be hooked */
    PyObject *entered; /* what Python knows; NULL: the rest is known here */
    int wants, count;
    int is_marked; /* it is left to marks.c */
    uint64_t sequence;
    int64_t lost; /* that of the thread's state */
    Edge edges[INPUTS];
} Begun;
int graph_begins(Begun *begun, size_t shape, PyObject *state, PyObject *const *args, Py_ssize_t count);
int graph_ends(Begun *begun, PyObject *state, PyObject *module, uint64_t number, PyObject *const *args, Py_ssize_t count, PyObject *output);
void graph_forgets(Begun *begun);
PyObject *walk_from(PyObject *self, PyObject *const *args, Py_ssize_t count);
uint64_t number_of(PyObject *node);
void dropped_one(void);

/* told.c */
int told_after(const Told *told, PyObject *state, PyObject *output, int64_t elapsed, int64_t self, int is_again);
int told_before(Told *told, size_t shape, PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names);
void told_forgets(const Told *told);

/* marks.c */
int marks_begin(Begun *begun, PyObject *state, PyObject *const *args, Py_ssize_t count);
int marks_end(const Begun *begun, PyObject *state, PyObject *node, uint64_t at, uintptr_t key, uint64_t number);
int marks_called(PyObject *capsule, PyObject *state, int64_t mark);
void marks_close(PyObject *state, uintptr_t thread, uint64_t low, uint64_t turn, int64_t mark);
void marks_outermost(PyObject *state);
int marks_since(PyObject *state, uintptr_t thread, uint64_t low, uint64_t turn, Since *since);
void marks_stop(void);

#pragma GCC visibility pop
#endif
