/* How long the backward of each call takes, where nobody wants more than that of it: for totals of backward passes.
 *
 * torch runs the nodes of a graph in the order of their numbers, the last one first, as soon as they are ready; a node's number is
 * higher than those of all that it leads to. So the nodes that a call has made run one after the other, and if the node that was made just
 * before it has made its input, that one runs just after it. A mark on a node says when it is about to run. The mark on the node behind a
 * call's output begins the backward of that call, and ends those of all calls whose nodes have higher numbers. So a call needs one mark, where
 * an input was made just before it, and no other node of it is looked at; in a chain of modules that is so. All other calls are left to graph.c.
 *
 * AccumulateGrad runs at once, whatever its number: what a weight's takes is part of the call whose weight it is.
 *
 * A mark is a hook of a tensor, which torch takes as the dict that a tensor has for its hooks: to register a hook of a node takes
 * a Python function of torch's, which costs ten times as much.
 *
 * Sources: torch/csrc/autograd/engine.cpp `CompareNodeTaskTime`, `call_tensor_pre_hooks`; torch/csrc/autograd/function.h Note [Sequence Number];
 * torch/csrc/autograd/python_cpp_function.cpp `THPCppFunction_register_hook_dict`; 2.1 to 2.15.
 */
#include "entry.h"

typedef struct Span Span;
struct Span { /* the nodes of one call */
    long refs;
    Span *outer;          /* the next one that begins at the same mark, of a module around this one */
    uintptr_t key;        /* the module's address, and the number of what is counted of it: whose totals its time is added to */
    uint64_t number, low; /* its nodes have the number `low` or a higher one */
    uint64_t turn;        /* in which calls have returned: those inside before those around them */
    size_t back;
    double times[];       /* for how many steps its time stands, for each of `back` totals */
};

struct Mark { /* on a node */
    uint64_t node;    /* its number, */
    uintptr_t thread; /* which the thread has given it whose state was there */
    Span *spans;      /* that begin at it, the outermost first */
};

typedef struct Open Open;
struct Open { /* a span in a backward that is under way */
    Open *below;
    PyObject *state;  /* of the thread that runs it */
    long long task;   /* the number of that backward */
    uintptr_t thread; /* that of the mark */
    Span *span;
    Since since;
};

static const char MARK[] = "hookd mark", LAST[] = "hookd end";
enum { MOST_OPEN = 4096 };
static struct {
    Open *open; /* of all threads; what is inside of another one before that */
    size_t count;
    long long awaited; /* the last backward whose end will be told */
} spans = {.awaited = -1};

static long long stored(PyObject *number) { return PyLong_AsLongLong(number); } /* one that hookd has stored */

static void span_dropped(Span *span) {
    if (!--span->refs)
        PyMem_RawFree(span);
}

static void mark_dropped(PyObject *capsule) {
    Mark *mark = PyCapsule_GetPointer(capsule, MARK);
    if (entry.last == mark)
        entry.last = NULL;
    for (Span *span = mark->spans, *outer; span; span = outer) {
        outer = span->outer;
        span_dropped(span);
    }
    PyMem_RawFree(mark);
    dropped_one();
}

static void last_dropped(PyObject *capsule) {
    PyMem_RawFree(PyCapsule_GetPointer(capsule, LAST));
    dropped_one();
}

/* Return what torch is to call: `host.hooked` with a capsule, which owns `what`; freed where there is no memory. */
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

/* Put a mark on a node, which is the last one then. 0: it failed; an exception may be set. */
static int marked(PyObject *node, uint64_t number, PyObject *state) {
    Mark *mark = PyMem_RawCalloc(1, sizeof *mark);
    if (mark)
        mark->node = number, mark->thread = (uintptr_t)state;
    PyObject *called = callable(mark, MARK, mark_dropped), *hooks = called ? PyDict_New() : NULL, *given[2] = {node, entry.host.carrier}, *done = NULL;
    if (hooks && !PyDict_SetItem(hooks, entry.zero, called) && !PyObject_SetAttr(entry.host.carrier, entry.hooks_name, hooks))
        done = PyObject_VectorcallMethod(entry.dict_name, given, 2, NULL);
    if (done)
        entry.last = mark; /* the carrier has it as well, until the next one is made */
    PyObject *made[] = {hooks, called, done};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        if (made[i])
            Py_DecRef(made[i]);
    return done != NULL;
}

static int is_last(uint64_t number, PyObject *state) {
    return entry.last && entry.last->node == number && entry.last->thread == (uintptr_t)state;
}

/* Return the node that made an input, if it has this number; NULL: it has not, or an exception is set. */
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

/* Whether the end of a call that begins can be known by a mark, which is made where there is none: `begun->sequence` is the number that its
 * first node will have. The first calls inside of a model are left to graph.c: Python hooks the model, and must see them end before it does. */
int marks_begin(Begun *begun, PyObject *state, PyObject *const *args, Py_ssize_t count) {
    uint64_t before = begun->sequence - 1;
    if (entry.host.carrier == &_Py_NoneStruct || begun->wants & ~(TIMED | WALKS | ADDS))
        return 0;
    if (entry.first_thread != entry.thread)
        entry.first_thread = entry.thread, entry.first = begun->sequence;
    PyObject *node = NULL;
    for (Py_ssize_t i = 1; i < count && !node && begun->sequence > entry.first; i++)
        node = maker_of(args[i], before);
    int is_known = node && (is_last(before, state) || marked(node, before, state));
    if (node)
        Py_DecRef(node);
    PyErr_Clear();
    return is_known;
}

/* Have the backward of a call that ends begin at the node behind its output, whose number is `at`. 0: it failed; an exception may be set. */
int marks_end(const Begun *begun, PyObject *state, PyObject *node, uint64_t at, uintptr_t key, uint64_t number) {
    const Count *counted = begun->wants & ADDS ? still(key, number) : NULL;
    if (!counted)
        return 1;
    Span *span = PyMem_RawCalloc(1, sizeof *span + counted->back * sizeof *span->times);
    if (!span)
        return 0;
    *span = (Span){1, NULL, key, number, begun->sequence, ++entry.turn, counted->back};
    for (size_t i = 0; i < counted->back; i++) {
        const double *standing = counted->totals[counted->count + i].standing;
        span->times[i] = standing[IS_ON] ? standing[STEPS] : 0.0;
    }
    if (!is_last(at, state) && !marked(node, at, state)) {
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

/* Take one out, which may run any code if it was the last to know of its thread. */
static void take_out(Open **place) {
    Open *open = *place;
    *place = open->below, spans.count--;
    span_dropped(open->span);
    PyObject *state = open->state;
    PyMem_RawFree(open);
    Py_DecRef(state);
}

/* Take the time of one that is over. */
static void end(const Open *open, int64_t mark) {
    const Host *host = &entry.host;
    PyObject *state = open->state;
    int64_t spent = mark - open->since.started - (stored(*at(state, host->lost)) - open->since.lost), inner = stored(*at(state, host->inner));
    int64_t self = spent - (inner - open->since.inner);
    add(open->span, spent - (stored(*at(state, host->again)) - open->since.again), self > 0 ? self : 0);
    if (open->since.inner + spent > inner)
        set_to(at(state, host->inner), PyLong_FromLongLong(open->since.inner + spent));
}

typedef struct { /* spans of a backward that this thread runs */
    PyObject *state;
    long long task;
    uintptr_t thread; /* that of their marks; 0: whatever it is */
    uint64_t low, turn; /* with such a number or a higher one, and an earlier turn */
} Which;

static int is_of(const Open *open, const Which *which) {
    return open->state == which->state && open->task == which->task && (!which->thread || open->thread == which->thread) &&
           open->span->low >= which->low && open->span->turn < which->turn;
}

static void end_all(const Which *which, int64_t mark) {
    for (Open **place = &spans.open; *place;)
        if (is_of(*place, which)) {
            end(*place, mark);
            take_out(place); /* it runs nothing: this thread has a state */
        } else
            place = &(*place)->below;
}

/* Return the number of the backward that is under way; -1: there is none, or what is compiled has no number. */
static long long task_now(void) {
    PyObject *number = PyObject_Vectorcall(entry.host.task, NULL, 0, NULL);
    long long task = number ? stored(number) : -1;
    if (number)
        Py_DecRef(number);
    else
        PyErr_Clear();
    return task;
}

/* End the spans inside of a call that graph.c or Python has hooked, which ends now: `thread` is the address of the state of the thread that has made it. */
void marks_close(PyObject *state, uintptr_t thread, uint64_t low, uint64_t turn, int64_t mark) {
    if (spans.open)
        end_all(&(Which){state, task_now(), thread, low, turn}, mark);
}

/* Tell when what is open inside of a call began that graph.c or Python has hooked: torch calls the marks of a node before what hooks the node itself,
 * so that a call which gives back what one inside of it has made would begin after that one. 0: nothing is. */
int marks_since(PyObject *state, uintptr_t thread, uint64_t low, uint64_t turn, Since *since) {
    Which inside = {state, spans.open ? task_now() : -1, thread, low, turn};
    int is_found = 0;
    for (const Open *open = spans.open; open; open = open->below)
        if (is_of(open, &inside))
            *since = open->since, is_found = 1;
    return is_found;
}

/* Forget what is open: of this backward; of those before it in this thread; or, without a thread, of all that there are. */
static void forget(PyObject *state, long long task, int is_older) {
    for (Open **place = &spans.open; *place;) {
        Open *open = *place;
        if (!state || (is_older ? open->state == state && open->task < task : open->task == task))
            take_out(place), place = &spans.open; /* that may have run any code */
        else
            place = &open->below;
    }
}

/* Have what is still open then ended with this backward. */
static void ask_for_end(PyObject *state, long long task) {
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

/* The outermost call of a thread begins: what a backward that has raised has left open is forgotten, unless the call is inside of one. */
void marks_outermost(PyObject *state) {
    if (spans.open && task_now() < 0)
        forget(state, INT64_MAX, 1);
}

/* Forget what the oldest backward has left, where there is no room: it may have raised in a thread that has ended. */
static void make_room(const Which *here) {
    long long oldest = here->task;
    for (const Open *open = spans.open; open; open = open->below)
        if (open->task < oldest)
            oldest = open->task;
    if (oldest < here->task)
        forget(here->state, oldest, 0);
}

/* Begin a span, around those that have begun at the same node by another mark. */
static void begin(Span *span, const Which *here, int64_t mark) {
    const Host *host = &entry.host;
    if (spans.count >= MOST_OPEN)
        make_room(here);
    Open *open = spans.count < MOST_OPEN ? PyMem_RawCalloc(1, sizeof *open) : NULL, **place = &spans.open;
    if (!open)
        return;
    while (*place && is_of(*place, &(Which){here->state, here->task, here->thread, span->low, span->turn}))
        place = &(*place)->below;
    PyObject *state = here->state;
    Since since = {mark, stored(*at(state, host->inner)), stored(*at(state, host->lost)), stored(*at(state, host->again))};
    *open = (Open){*place, state, here->task, here->thread, span, since};
    *place = open, spans.count++, span->refs++;
    Py_IncRef(state);
}

/* A node that has a mark is about to run. */
static void meet(const Mark *mark, PyObject *state, int64_t since) {
    Which which = {state, task_now(), mark->thread, mark->node + 1, UINT64_MAX};
    if (which.task < 0)
        return;
    end_all(&which, since);
    for (Span *span = mark->spans; span; span = span->outer)
        if (span->low > mark->node) /* of a module that gives back what it was given */
            add(span, 0, 0);
        else {
            if (spans.awaited != which.task)
                ask_for_end(state, which.task);
            begin(span, &which, since);
        }
}

/* What `host.hooked` calls for a capsule of this file; 0: it is none. */
int marks_called(PyObject *capsule, PyObject *state, int64_t mark) {
    const char *name = PyCapsule_GetName(capsule);
    if (name == MARK)
        meet(PyCapsule_GetPointer(capsule, MARK), state, mark);
    else if (name == LAST) {
        long long task = *(long long *)PyCapsule_GetPointer(capsule, LAST);
        end_all(&(Which){state, task, 0, 0, UINT64_MAX}, mark);
        forget(state, task, 0); /* what other threads have begun: when it ended nobody knows */
    }
    return name == MARK || name == LAST;
}

/* Forget all. */
void marks_stop(void) { forget(NULL, 0, 0); }
