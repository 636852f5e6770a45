/* The duration of each call's backward, for totals of backward passes, if no listener needs more than that.
 *
 * torch runs the nodes of a graph as soon as they are ready, those with the highest sequence number first. A node's
 * number is higher than those of all nodes that it leads to. So the nodes that a call has made run one after the
 * other; and if the call's input was made by the node created just before the call, that node runs just after them. A
 * probe on a node reports that the node is about to run. The probe on the node behind a call's output begins the
 * backward of that call, and ends the backwards of all calls whose nodes have higher numbers. So a call whose input
 * was made just before it needs a single probe, and its other nodes need not be examined. In a chain of modules this is
 * so for every call. All other calls are left to graph.c.
 *
 * AccumulateGrad runs at once, whatever its number: its time is part of the call that uses the weight.
 *
 * A probe is a tensor hook, which torch accepts as the dict of a tensor's hooks. A node hook has to be registered
 * through a Python function of torch, which costs ten times as much.
 *
 * Sources: torch/csrc/autograd/engine.cpp `CompareNodeTaskTime`, `call_tensor_pre_hooks`;
 * torch/csrc/autograd/function.h Note [Sequence Number]; torch/csrc/autograd/python_cpp_function.cpp
 * `THPCppFunction_register_hook_dict`; 2.1 to 2.15.
 */
#include "entry.h"

typedef struct Span Span;
struct Span { /* the nodes of one call */
    long refs;
    Span *outer;          /* the next span that begins at the same probe, of an enclosing module */
    uintptr_t key;        /* the module's address; with the number of its `Count` it identifies the totals to which the time is added */
    uint64_t number, low; /* its nodes have sequence number `low` or higher */
    uint64_t ordinal;     /* numbers calls in the order of their return: inner calls come before outer ones */
    size_t back;
    double times[];       /* for each of `back` totals, the number of steps that its time represents */
};

struct Probe { /* a probe on a node */
    uint64_t node;    /* the node's sequence number */
    uintptr_t thread; /* address of the state of the thread that has numbered it */
    Span *spans;      /* the spans that begin at it, the outermost first */
};

typedef struct Open Open;
struct Open { /* a span in a backward that is running */
    Open *below;
    PyObject *state;  /* of the thread that runs the backward */
    long long task;   /* number of the backward */
    uintptr_t thread; /* `thread` of the probe */
    Span *span;
    Since since;
};

static const char PROBE[] = "hookd probe", LAST[] = "hookd end";
enum { MOST_OPEN = 4096 };
static struct {
    Open *open; /* of all threads; inner spans come before outer ones */
    size_t count;
    long long awaited; /* the last backward whose end torch will report */
} spans = {.awaited = -1};

static long long stored(PyObject *number) { return PyLong_AsLongLong(number); } /* a number stored by hookd */

static void span_dropped(Span *span) {
    if (!--span->refs)
        PyMem_RawFree(span);
}

static void probe_dropped(PyObject *capsule) {
    Probe *probe = PyCapsule_GetPointer(capsule, PROBE);
    if (entry.last == probe)
        entry.last = NULL;
    for (Span *span = probe->spans, *outer; span; span = outer) {
        outer = span->outer;
        span_dropped(span);
    }
    PyMem_RawFree(probe);
    dropped_one();
}

static void last_dropped(PyObject *capsule) {
    PyMem_RawFree(PyCapsule_GetPointer(capsule, LAST));
    dropped_one();
}

/* Return the callable for torch: `host.hooked` with a capsule that owns `what`. NULL if there is no memory; `what` is
 * freed. */
static PyObject *callable(void *what, const char *name, void (*dropped)(PyObject *)) {
    PyObject *capsule = what ? PyCapsule_New(what, name, dropped) : NULL;
    if (!capsule) {
        PyMem_RawFree(what);
        return NULL;
    }
    entry.hooks++;
    PyObject *made = PyMethod_New(entry.host.hooked, capsule);
    Py_DecRef(capsule);
    return made;
}

/* Put a probe on a node; it becomes `entry.last`. Return 0 if that failed; an exception may be set. */
static int put_probe(PyObject *node, uint64_t number, PyObject *state) {
    Probe *probe = PyMem_RawCalloc(1, sizeof *probe);
    if (probe)
        probe->node = number, probe->thread = (uintptr_t)state;
    PyObject *called = callable(probe, PROBE, probe_dropped), *hooks = called ? PyDict_New() : NULL, *given[2] = {node, entry.host.carrier}, *done = NULL;
    if (hooks && !PyDict_SetItem(hooks, entry.zero, called) && !PyObject_SetAttr(entry.host.carrier, entry.hooks_name, hooks))
        done = PyObject_VectorcallMethod(entry.dict_name, given, 2, NULL);
    if (done)
        entry.last = probe; /* the carrier refers to it as well, until the next probe is made */
    PyObject *made[] = {hooks, called, done};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        if (made[i])
            Py_DecRef(made[i]);
    return done != NULL;
}

static int is_last(uint64_t number, PyObject *state) {
    return entry.last && entry.last->node == number && entry.last->thread == (uintptr_t)state;
}

/* Return the node that made an input, if it has this sequence number; else NULL, also if an exception is set. */
static PyObject *maker_of(PyObject *input, uint64_t number) {
    const void *impl = plain(input);
    if (!impl || !FIELD(void *, impl, entry.layout.autograd))
        return NULL;
    PyObject *node = PyObject_GetAttr(input, entry.node_name);
    if (node && (node == &_Py_NoneStruct || number_of(node) != number)) {
        Py_DecRef(node);
        node = NULL;
    }
    return node;
}

/* Whether a probe can report the end of the backward of a call that begins; the probe is made if it is missing.
 * `begun->sequence` is the number that the call's first node will have. The first calls inside of a model are left to
 * graph.c: Python hooks the model, and must see their backwards end before the model's does. */
int spans_begin(Begun *begun, PyObject *state, PyObject *const *args, Py_ssize_t count) {
    uint64_t before = begun->sequence - 1;
    if (entry.host.carrier == &_Py_NoneStruct || begun->wants & ~(TIMED | WALKS | ADDS))
        return 0;
    if (entry.first_thread != entry.thread)
        entry.first_thread = entry.thread, entry.first = begun->sequence;
    PyObject *node = NULL;
    for (Py_ssize_t i = 1; i < count && !node && begun->sequence > entry.first; i++)
        node = maker_of(args[i], before);
    int is_known = node && (is_last(before, state) || put_probe(node, before, state));
    if (node)
        Py_DecRef(node);
    PyErr_Clear();
    return is_known;
}

/* Let the backward of a call that ends begin at the node behind its output, whose number is `at`. Return 0 if that
 * failed; an exception may be set. */
int spans_end(const Begun *begun, PyObject *state, PyObject *node, uint64_t at, uintptr_t key, uint64_t number) {
    const Count *counted = begun->wants & ADDS ? still(key, number) : NULL;
    if (!counted)
        return 1;
    Span *span = PyMem_RawCalloc(1, sizeof *span + counted->back * sizeof *span->times);
    if (!span)
        return 0;
    *span = (Span){1, NULL, key, number, begun->sequence, ++entry.ordinal, counted->back};
    for (size_t i = 0; i < counted->back; i++) {
        const double *standing = counted->totals[counted->count + i].standing;
        span->times[i] = standing[IS_ON] ? standing[STEPS] : 0.0;
    }
    if (!is_last(at, state) && !put_probe(node, at, state)) {
        PyMem_RawFree(span);
        return 0;
    }
    span->outer = entry.last->spans, entry.last->spans = span;
    return 1;
}

static void add(const Span *span, int64_t elapsed, int64_t self) {
    const Count *counted = still(span->key, span->number);
    for (size_t i = 0; counted && i < span->back; i++) {
        const Totals *totals = &counted->totals[counted->count + i];
        if (span->times[i] > 0 && totals->standing[IS_ACTIVE])
            add_to(totals, span->times[i], elapsed, self);
    }
}

/* Remove an open span. This may run any code if the span held the last reference to its thread's state. */
static void take_out(Open **place) {
    Open *open = *place;
    *place = open->below, spans.count--;
    span_dropped(open->span);
    PyObject *state = open->state;
    PyMem_RawFree(open);
    Py_DecRef(state);
}

/* Add the time of a span that has ended. */
static void end(const Open *open, int64_t now_ns) {
    const Host *host = &entry.host;
    PyObject *state = open->state;
    int64_t spent = now_ns - open->since.started - (stored(*at(state, host->lost)) - open->since.lost), inner = stored(*at(state, host->inner));
    int64_t self = spent - (inner - open->since.inner);
    add(open->span, spent - (stored(*at(state, host->recomputed)) - open->since.recomputed), self > 0 ? self : 0);
    if (open->since.inner + spent > inner)
        set_to(at(state, host->inner), PyLong_FromLongLong(open->since.inner + spent));
}

typedef struct { /* selects spans of a backward that this thread runs */
    PyObject *state;
    long long task;
    uintptr_t thread; /* `thread` of their probes; 0: any */
    uint64_t low, ordinal; /* spans with this number or a higher one, and an earlier ordinal */
} Which;

static int is_of(const Open *open, const Which *which) {
    return open->state == which->state && open->task == which->task && (!which->thread || open->thread == which->thread) &&
           open->span->low >= which->low && open->span->ordinal < which->ordinal;
}

static void end_all(const Which *which, int64_t now_ns) {
    for (Open **place = &spans.open; *place;)
        if (is_of(*place, which)) {
            end(*place, now_ns);
            take_out(place); /* runs no other code: this thread's state has another reference */
        } else
            place = &(*place)->below;
}

/* Return the number of the current backward; -1 if there is none, or if it is compiled and has no number. */
static long long task_now(void) {
    PyObject *number = PyObject_Vectorcall(entry.host.task, NULL, 0, NULL);
    long long task = number ? stored(number) : -1;
    if (number)
        Py_DecRef(number);
    else
        PyErr_Clear();
    return task;
}

/* End the spans inside of a call that graph.c or Python has hooked, and that ends now. `thread` is the address of the
 * state of the thread that made the call. */
void spans_close(PyObject *state, uintptr_t thread, uint64_t low, uint64_t ordinal, int64_t now_ns) {
    if (spans.open)
        end_all(&(Which){state, task_now(), thread, low, ordinal}, now_ns);
}

/* Find when the outermost open span inside of a call began that graph.c or Python has hooked. torch calls the probes of
 * a node before the node's own hooks, so a call that returns the output of a nested call would otherwise begin after
 * the nested one. Return 0 if no span is open. */
int spans_since(PyObject *state, uintptr_t thread, uint64_t low, uint64_t ordinal, Since *since) {
    Which inside = {state, spans.open ? task_now() : -1, thread, low, ordinal};
    int is_found = 0;
    for (const Open *open = spans.open; open; open = open->below)
        if (is_of(open, &inside))
            *since = open->since, is_found = 1;
    return is_found;
}

/* Forget open spans: of this backward; of earlier ones in this thread (`is_older`); or all of them, without a thread. */
static void forget(PyObject *state, long long task, int is_older) {
    for (Open **place = &spans.open; *place;) {
        Open *open = *place;
        if (!state || (is_older ? open->state == state && open->task < task : open->task == task))
            take_out(place), place = &spans.open; /* that may have run any code */
        else
            place = &open->below;
    }
}

/* Ask torch to report the end of this backward; the spans still open then end with it. */
static void ask_for_end(long long task) {
    spans.awaited = task;
    long long *last = PyMem_RawCalloc(1, sizeof *last);
    if (last)
        *last = task;
    PyObject *called = callable(last, LAST, last_dropped), *given[2] = {NULL, called};
    PyObject *done = called ? PyObject_Vectorcall(entry.host.queue, given + 1, 1 | OFFSET, NULL) : NULL;
    if (called)
        Py_DecRef(called);
    if (done)
        Py_DecRef(done);
    PyErr_Clear();
}

/* Called when a thread's outermost call begins: forget the spans that a backward has left open when it raised, unless
 * the call is inside of a backward. */
void spans_outermost(PyObject *state) {
    if (spans.open && task_now() < 0)
        forget(state, INT64_MAX, 1);
}

/* Make room by forgetting what the oldest backward has left: it may have raised in a thread that has ended. */
static void make_room(const Which *here) {
    long long oldest = here->task;
    for (const Open *open = spans.open; open; open = open->below)
        if (open->task < oldest)
            oldest = open->task;
    if (oldest < here->task)
        forget(here->state, oldest, 0);
}

/* Begin a span, outside of the nested ones that have begun at the same node by another probe. */
static void begin(Span *span, const Which *here, int64_t now_ns) {
    const Host *host = &entry.host;
    if (spans.count >= MOST_OPEN)
        make_room(here);
    Open *open = spans.count < MOST_OPEN ? PyMem_RawCalloc(1, sizeof *open) : NULL, **place = &spans.open;
    if (!open)
        return;
    while (*place && is_of(*place, &(Which){here->state, here->task, here->thread, span->low, span->ordinal}))
        place = &(*place)->below;
    PyObject *state = here->state;
    Since since = {now_ns, stored(*at(state, host->inner)), stored(*at(state, host->lost)), stored(*at(state, host->recomputed))};
    *open = (Open){*place, state, here->task, here->thread, span, since};
    *place = open, spans.count++, span->refs++;
    Py_IncRef(state);
}

/* Handle a probe whose node is about to run. */
static void meet(const Probe *probe, PyObject *state, int64_t since) {
    Which which = {state, task_now(), probe->thread, probe->node + 1, UINT64_MAX};
    if (which.task < 0)
        return;
    end_all(&which, since);
    for (Span *span = probe->spans; span; span = span->outer)
        if (span->low > probe->node) /* of a module that returns its input */
            add(span, 0, 0);
        else {
            if (spans.awaited != which.task)
                ask_for_end(which.task);
            begin(span, &which, since);
        }
}

/* Handle a capsule for `host.hooked`. Return 0 if it is not from this file. */
int spans_called(PyObject *capsule, PyObject *state, int64_t now_ns) {
    const char *name = PyCapsule_GetName(capsule);
    if (name == PROBE)
        meet(PyCapsule_GetPointer(capsule, PROBE), state, now_ns);
    else if (name == LAST) {
        long long task = *(long long *)PyCapsule_GetPointer(capsule, LAST);
        end_all(&(Which){state, task, 0, 0, UINT64_MAX}, now_ns);
        forget(state, task, 0); /* spans of other threads: when they ended is unknown */
    }
    return name == PROBE || name == LAST;
}

/* Forget all spans. */
void spans_stop(void) { forget(NULL, 0, 0); }
