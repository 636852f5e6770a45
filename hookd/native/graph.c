/* Observes the gradients that enter and leave a module, with hooks on the existing autograd nodes. It does what
 * hookd/target/events/backward.py does and describes, for module calls that are counted in C and whose gradients
 * Python listeners need, or only those that are not finite. Python does it for everything that is not plain: an input
 * that is a leaf, several nodes behind one output, tensors on a device, a plugin that changes gradients.
 *
 * torch keeps a hook as a bound method of `host.hooked`, a Python function that dynamo can read, with a capsule that
 * holds the data needed here. A graph may outlive hookd: a hook called then does nothing, and this library stays
 * loaded until the last hook is gone (forever, if the interpreter's queue of pending calls is full at that moment).
 *
 * Source: torch/csrc/autograd/python_cpp_function.cpp `THPCppFunction_register_prehook`, 2.1 to 2.15.
 */
#include "entry.h"

enum { MOST = 20000 }; /* limit of nodes of one module that are examined, as in hookd/target/events/backward.py */

struct Flow { /* the gradients of one call, while a backward runs through it; it holds no node of the module */
    long refs;
    PyObject *module, *listeners;
    uintptr_t key; /* the module's address; with the number of its `Count` it identifies the totals to which the time is added */
    uint64_t number, low, ordinal; /* the call's nodes have sequence number `low` or higher; `ordinal` as in spans.c */
    uintptr_t maker; /* address of the state of the thread that made these nodes */
    size_t back;   /* number of totals; `times` has for each how many steps the call represents */
    double *times;
    int wants;
    Py_ssize_t inputs, outputs;
    int is_open, is_bad; /* is_bad: some gradient so far is not known to be finite */
    Py_ssize_t due_out, due_in;
    PyObject *thread; /* that began this backward */
    Since since;
    PyObject *grads[]; /* of the outputs, then of the inputs; NULL: none so far */
};

typedef struct { /* the place of a gradient at a node, and the index of its tensor */
    Py_ssize_t at, tensor;
} Place;

typedef struct {
    Flow *flow;
    int is_before;
    Py_ssize_t own;  /* whether the node itself leads to an input */
    PyObject *later; /* the nodes that lead to an input and run later, as a tuple; NULL: the hook is called after its node */
    Py_ssize_t count;
    Place places[];
} Hook;

static const char NAME[] = "hookd";

/* Note that torch has released a hook. */
void dropped_one(void) {
    if (!--entry.hooks && entry.handle && dlclose) /* hookd is gone, and this was the last hook: unload this library once none of its code runs */
        Py_AddPendingCall(dlclose, entry.handle);
}

static void dropped(Flow *flow) {
    if (--flow->refs)
        return;
    for (Py_ssize_t i = 0; i < flow->inputs + flow->outputs; i++)
        if (flow->grads[i])
            Py_DecRef(flow->grads[i]);
    if (flow->thread)
        Py_DecRef(flow->thread);
    Py_DecRef(flow->module);
    Py_DecRef(flow->listeners);
    PyMem_RawFree(flow);
}

static void forgotten(PyObject *capsule) { /* the graph is freed, or torch has not accepted the hook */
    Hook *hook = PyCapsule_GetPointer(capsule, NAME);
    dropped(hook->flow);
    if (hook->later)
        Py_DecRef(hook->later);
    PyMem_RawFree(hook);
    dropped_one();
}

/* Return the callable for torch, NULL if there is no memory; `later` is stolen in any case. */
static PyObject *hook_of(Flow *flow, int is_before, Py_ssize_t own, PyObject *later, const Place *places, Py_ssize_t count) {
    Hook *hook = PyMem_RawCalloc(1, sizeof *hook + (size_t)count * sizeof *places);
    PyObject *capsule = hook ? PyCapsule_New(hook, NAME, forgotten) : NULL;
    if (!capsule) {
        PyMem_RawFree(hook);
        if (later)
            Py_DecRef(later);
        return NULL;
    }
    hook->flow = flow, hook->is_before = is_before, hook->own = own, hook->later = later, hook->count = count;
    for (Py_ssize_t i = 0; i < count; i++)
        hook->places[i] = places[i];
    flow->refs++, entry.hooks++;
    PyObject *callable = PyMethod_New(entry.host.hooked, capsule);
    Py_DecRef(capsule);
    return callable;
}

static long long whole(PyObject *number) { return PyLong_AsLongLong(number); } /* a number stored by hookd */

/* What a hook takes before and after `called`, in ns: torch's call of a Python function, and the frame of `host.hooked`.
 * Measured as what such hooks that do nothing add to a backward, on a processor of 2.8 GHz: 440 to 530. */
enum { OUTSIDE_NS = 450 };

static void lose(PyObject *state, int64_t since) {
    PyObject **lost = at(state, entry.host.lost);
    int64_t spent = now() - since;
    set_to(lost, PyLong_FromLongLong(whole(*lost) + spent));
    if (entry.metered)
        entry.hooked += spent + OUTSIDE_NS;
}

/* Let Python handle an error of hookd's own. Return -1 if an exception is set, which is a signal handler's. */
static int failed(PyObject *state) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (!error)
        return 0;
    if (trace)
        PyException_SetTraceback(error, trace);
    PyObject *given[2] = {NULL, error}, *done = asking(state, entry.host.graph_failed, given + 1, 1), *made[] = {type, error, trace, done};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        if (made[i])
            Py_DecRef(made[i]);
    return done ? 0 : -1;
}

/* -- when a call begins */

/* Find the edge of an input; `edge->node` stays NULL if the input needs no gradient. Return 0 if Python has to find
 * it. */
static int edge_of(PyObject *input, Edge *edge) {
    if (TYPE(input) != entry.host.tensor)
        return input == &_Py_NoneStruct || !PyType_IsSubtype(TYPE(input), entry.host.tensor);
    const void *impl = plain(input);
    if (!impl)
        return 0;
    if (!FIELD(void *, impl, entry.layout.autograd))
        return 1;
    PyObject *node = PyObject_GetAttr(input, entry.node_name);
    if (node == &_Py_NoneStruct) { /* a leaf; one that requires a gradient is reached through a view */
        PyObject *learns = PyObject_GetAttr(input, entry.learns_name);
        Py_DecRef(node);
        if (learns)
            Py_DecRef(learns);
        return learns == &_Py_FalseStruct;
    }
    PyObject *nr = node ? PyObject_GetAttr(input, entry.nr_name) : NULL;
    *edge = (Edge){node, nr ? whole(nr) : -1};
    if (nr)
        Py_DecRef(nr);
    return nr != NULL;
}

/* Let Python note the state of the graph. Return -1 if an exception is set. */
static int begins_in_python(Begun *begun, PyObject *state, PyObject *const *args, Py_ssize_t count) {
    PyObject *given[3] = {NULL, state, packed(args + 1, count - 1)};
    PyObject *entered = given[2] ? asking(state, entry.host.graph_begins, given + 1, 2) : NULL;
    if (given[2])
        Py_DecRef(given[2]);
    if (entered == &_Py_NoneStruct) /* the reference need not be released: None is never freed */
        graph_forgets(begun), entered = NULL;
    else if (!entered)
        return -1;
    begun->entered = entered;
    return 0;
}

/* Note the state of the graph before a module runs. Return 0 to go on; `begun->listeners` is NULL if no graph is being
 * built. Return -1 if an exception is set, a signal handler's. */
int graph_begins(Begun *begun, size_t group, PyObject *state, PyObject *const *args, Py_ssize_t count) {
    *begun = (Begun){0};
    if (*at(state, entry.host.flows) != &_Py_TrueStruct || !gives(entry.host.grad_enabled, &_Py_TrueStruct))
        return 0;
    int64_t since = now();
    Py_IncRef(begun->listeners = entry.listeners[group]);
    begun->wants = entry.wants[group];
    int is_plain = count - 1 <= INPUTS && may_ask(), has_raised = 0;
    PyObject *sequence = is_plain ? PyObject_Vectorcall(entry.host.sequence, NULL, 0, NULL) : NULL;
    begun->sequence = sequence ? PyLong_AsUnsignedLongLong(sequence) : 0;
    is_plain = sequence != NULL; /* first of all, because reading an edge may create a node */
    if (sequence)
        Py_DecRef(sequence);
    begun->is_probed = is_plain && spans_begin(begun, state, args, count);
    if (begun->is_probed)
        begun->count = (int)count - 1; /* for the time it does not matter which edges these are */
    for (Py_ssize_t i = 1; i < count && is_plain && !begun->is_probed; i++)
        is_plain = edge_of(args[i], &begun->edges[begun->count++]);
    if (!is_plain) {
        PyErr_Clear();
        has_raised = begins_in_python(begun, state, args, count);
        since = now(); /* Python has counted its own time */
    }
    lose(state, since);
    begun->lost = whole(*at(state, entry.host.lost));
    return has_raised;
}

void graph_forgets(Begun *begun) {
    for (int i = 0; i < begun->count; i++)
        if (begun->edges[i].node)
            Py_DecRef(begun->edges[i].node);
    if (begun->entered)
        Py_DecRef(begun->entered);
    if (begun->listeners)
        Py_DecRef(begun->listeners);
    *begun = (Begun){0};
}

/* -- when it ends */

uint64_t number_of(PyObject *node) { /* UINT64_MAX: it leads to no other node, or an exception is set */
    PyObject *number = PyObject_VectorcallMethod(entry.sequence_name, &node, 1, NULL);
    uint64_t found = number ? PyLong_AsUnsignedLongLong(number) : UINT64_MAX;
    if (number)
        Py_DecRef(number);
    return found;
}

typedef struct { /* what was found of a module's nodes */
    PyObject *seen, *nodes, *entries; /* a dict of all; a list of those still to be examined; a list of those that lead to an input, or run last */
    Place *places;                    /* of all entries, one entry after the other */
    Py_ssize_t *counts;               /* number of places of each entry */
    Py_ssize_t size, room;
    PyObject *last;                   /* the node that runs last, borrowed */
    uint64_t least;
} Walk;

static int roomy(Walk *walk, Py_ssize_t places, Py_ssize_t entries) { /* makes room for one more of both */
    if (places < walk->room && entries < walk->room)
        return 1;
    Py_ssize_t room = walk->room ? 4 * walk->room : 8;
    Place *more = PyMem_RawRealloc(walk->places, (size_t)room * sizeof *more);
    if (more)
        walk->places = more;
    Py_ssize_t *counts = more ? PyMem_RawRealloc(walk->counts, (size_t)room * sizeof *counts) : NULL;
    if (counts)
        walk->counts = counts, walk->room = room;
    return counts != NULL;
}

/* Examine the nodes that a node leads to. Return 0 if an exception is set, or there is no memory. */
static int followed(Walk *walk, const Begun *begun, PyObject *node) {
    PyObject *following = PyObject_GetAttr(node, entry.following_name);
    Py_ssize_t size = following ? PyTuple_Size(following) : -1, first = walk->size, entries = PyList_Size(walk->entries);
    int is_right = size >= 0;
    for (Py_ssize_t i = 0; i < size && is_right; i++) {
        PyObject *pair = PyTuple_GetItem(following, i), *next = PyTuple_GetItem(pair, 0);
        long long nr = whole(PyTuple_GetItem(pair, 1));
        Py_ssize_t input = 0;
        while (input < begun->count && !(begun->edges[input].node == next && begun->edges[input].nr == nr))
            input++;
        if (input < begun->count) {
            is_right = roomy(walk, walk->size, entries);
            if (is_right)
                walk->places[walk->size++] = (Place){i, input};
        } else if (next != &_Py_NoneStruct) {
            uint64_t number = number_of(next);
            if (number >= begun->sequence && number < UINT64_MAX)
                is_right = !PyList_Append(walk->nodes, next);
            else
                is_right = !PyErr_Occurred();
        }
    }
    if (is_right && walk->size > first) {
        walk->counts[entries] = walk->size - first;
        is_right = !PyList_Append(walk->entries, node);
    }
    if (following)
        Py_DecRef(following);
    return is_right;
}

static int has_in(PyObject *list, PyObject *object) {
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++)
        if (PyList_GetItem(list, i) == object)
            return 1;
    return 0;
}

/* Walk from some nodes down to the inputs of their module, as `_Walk` of hookd/target/events/backward.py does. Return
 * 0 if it failed. */
static int walked(Walk *walk, const Begun *begun, PyObject *const *nodes, Py_ssize_t count) {
    *walk = (Walk){PyDict_New(), PyList_New(0), PyList_New(0), .least = UINT64_MAX};
    int is_right = walk->seen && walk->nodes && walk->entries;
    for (Py_ssize_t i = 0; i < count && is_right; i++) {
        uint64_t number = number_of(nodes[i]);
        is_right = !PyErr_Occurred() && (number < begun->sequence || !PyList_Append(walk->nodes, nodes[i]));
    }
    for (Py_ssize_t size; is_right && (size = PyList_Size(walk->nodes)) && PyDict_Size(walk->seen) < MOST;) {
        PyObject *one = PyList_GetItem(walk->nodes, size - 1);
        Py_IncRef(one);
        is_right = !PyList_SetSlice(walk->nodes, size - 1, size, NULL);
        int is_new = is_right && PyDict_Contains(walk->seen, one) == 0;
        if (is_new) {
            uint64_t number = number_of(one);
            if (number <= walk->least)
                walk->least = number, walk->last = one;
            is_right = !PyErr_Occurred() && !PyDict_SetItem(walk->seen, one, &_Py_NoneStruct) && followed(walk, begun, one);
        }
        Py_DecRef(one);
    }
    Py_ssize_t entries = is_right ? PyList_Size(walk->entries) : 0;
    if (is_right && walk->last && (begun->wants & TIMED || !entries) && !has_in(walk->entries, walk->last)) {
        is_right = roomy(walk, walk->size, entries) && !PyList_Append(walk->entries, walk->last);
        if (is_right)
            walk->counts[entries] = 0;
    }
    return is_right;
}

static void ended(Walk *walk) {
    PyObject *made[] = {walk->seen, walk->nodes, walk->entries};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        if (made[i])
            Py_DecRef(made[i]);
    PyMem_RawFree(walk->places);
    PyMem_RawFree(walk->counts);
}

/* Return the result of a walk: a dict of all nodes, and a list of (node, places) of the entries. NULL: an exception is
 * set. */
static PyObject *described(const Walk *walk) {
    PyObject *list = PyList_New(0);
    Py_ssize_t entries = PyList_Size(walk->entries), first = 0;
    for (Py_ssize_t i = 0; i < entries && list; first += walk->counts[i++]) {
        PyObject *places = PyList_New(0), *one = places ? PyTuple_New(2) : NULL;
        int is_right = one != NULL;
        for (Py_ssize_t j = first; j < first + walk->counts[i] && is_right; j++) {
            PyObject *pair = PyTuple_New(2);
            if (pair)
                PyTuple_SetItem(pair, 0, PyLong_FromLongLong(walk->places[j].at)), PyTuple_SetItem(pair, 1, PyLong_FromLongLong(walk->places[j].tensor));
            is_right = pair && !PyList_Append(places, pair);
            if (pair)
                Py_DecRef(pair);
        }
        if (is_right) {
            PyObject *node = PyList_GetItem(walk->entries, i);
            Py_IncRef(node), Py_IncRef(places);
            PyTuple_SetItem(one, 0, node), PyTuple_SetItem(one, 1, places);
            is_right = !PyList_Append(list, one);
        }
        if (one)
            Py_DecRef(one);
        if (places)
            Py_DecRef(places);
        if (!is_right)
            Py_DecRef(list), list = NULL;
    }
    PyObject *both = list ? PyTuple_New(2) : NULL;
    if (both)
        Py_IncRef(walk->seen), Py_IncRef(list), PyTuple_SetItem(both, 0, walk->seen), PyTuple_SetItem(both, 1, list);
    if (list)
        Py_DecRef(list);
    return both;
}

/* `walk(nodes, edges, sequence, is_timed)`: do what `_Walk` of hookd/target/events/backward.py does; return None to
 * leave it to Python. */
PyObject *walk_from(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Begun begun = {0};
    Walk walk = {0};
    PyObject *nodes[OUTPUTS], *result = NULL;
    Py_ssize_t outputs = count == 4 ? PyList_Size(args[0]) : -1, edges = count == 4 ? PyList_Size(args[1]) : -1;
    (void)self;
    if (entry.counts && outputs >= 0 && outputs <= OUTPUTS && edges >= 0 && edges <= INPUTS) {
        begun.sequence = PyLong_AsUnsignedLongLong(args[2]), begun.wants = args[3] == &_Py_TrueStruct ? TIMED : 0;
        for (; begun.count < edges; begun.count++) {
            PyObject *edge = PyList_GetItem(args[1], begun.count);
            if (edge != &_Py_NoneStruct)
                begun.edges[begun.count] = (Edge){PyTuple_GetItem(edge, 0), whole(PyTuple_GetItem(edge, 1))};
        }
        for (Py_ssize_t i = 0; i < outputs; i++)
            nodes[i] = PyList_GetItem(args[0], i);
        result = walked(&walk, &begun, nodes, outputs) ? described(&walk) : NULL;
        ended(&walk);
    }
    PyErr_Clear();
    if (!result)
        Py_IncRef(result = &_Py_NoneStruct);
    return result;
}

static int registered(PyObject *node, PyObject *name, PyObject *callable) { /* steals the callable */
    PyObject *given[2] = {node, callable}, *handle = callable ? PyObject_VectorcallMethod(name, given, 2, NULL) : NULL;
    if (handle)
        Py_DecRef(handle);
    if (callable)
        Py_DecRef(callable);
    return handle != NULL;
}

/* Hook the node behind a module's outputs, and those that lead to its inputs. Return 0 if it failed. */
static int hooked(Flow *flow, const Begun *begun, PyObject *node, uint64_t number, const Place *slots, Py_ssize_t count) {
    Walk walk = {0};
    int is_right = !(begun->wants & WALKS) || walked(&walk, begun, &node, 1);
    Py_ssize_t entries = is_right && walk.entries ? PyList_Size(walk.entries) : 0, own = 0, under = 0;
    PyObject *later = is_right ? PyList_New(0) : NULL;
    for (Py_ssize_t i = 0; i < entries && later; i++) {
        PyObject *one = PyList_GetItem(walk.entries, i);
        if (one == node)
            own = 1;
        else if (number_of(one) < number) /* a hook may hold only nodes that run later, or the graph is a reference cycle that is never freed */
            is_right = is_right && !PyList_Append(later, one), under++;
    }
    PyObject *nodes = later && is_right ? PyTuple_New(under) : NULL;
    for (Py_ssize_t i = 0; i < under && nodes; i++) {
        PyObject *one = PyList_GetItem(later, i);
        Py_IncRef(one);
        PyTuple_SetItem(nodes, i, one);
    }
    is_right = nodes && registered(node, entry.prehook_name, hook_of(flow, 1, own, nodes, slots, count));
    Py_ssize_t first = 0;
    for (Py_ssize_t i = 0; i < entries && is_right; first += walk.counts[i++])
        is_right = registered(PyList_GetItem(walk.entries, i), entry.hook_name, hook_of(flow, 0, 0, NULL, walk.places + first, walk.counts[i]));
    if (later)
        Py_DecRef(later);
    ended(&walk);
    return is_right;
}

typedef struct { /* the node that made the outputs of a call */
    PyObject *node; /* NULL: there is nothing to hook */
    uint64_t number;
    Py_ssize_t outputs, count;
    Place slots[OUTPUTS];
    int is_own;
} Maker;

/* Add an output. Return 0 if Python has to handle the call. */
static int made(Maker *maker, const Begun *begun, PyObject *output) {
    const void *impl = plain(output);
    Place slot = {0, maker->outputs++};
    if (!impl || maker->outputs > OUTPUTS)
        return 0;
    if (!FIELD(void *, impl, entry.layout.autograd))
        return 1;
    PyObject *node = PyObject_GetAttr(output, entry.node_name);
    if (!node || node == &_Py_NoneStruct) {
        if (node)
            Py_DecRef(node);
        return node != NULL;
    }
    PyObject *nr = PyObject_GetAttr(output, entry.nr_name);
    uint64_t number = number_of(node);
    slot.at = nr ? (Py_ssize_t)whole(nr) : -1;
    if (nr)
        Py_DecRef(nr);
    /* Outputs that the module passes through beside its own belong to the module that made them. */
    int is_own = number >= begun->sequence, is_right = slot.at >= 0 && !PyErr_Occurred();
    if (maker->node && is_own && !maker->is_own) {
        Py_DecRef(maker->node);
        maker->node = NULL, maker->count = 0;
    }
    if (maker->node && maker->is_own && !is_own) {
        Py_DecRef(node);
        return is_right;
    }
    is_right = is_right && (!maker->node || maker->node == node);
    if (maker->node || !is_right)
        Py_DecRef(node);
    else
        maker->node = node, maker->number = number, maker->is_own = is_own;
    maker->slots[maker->count++] = slot;
    return is_right;
}

static int found(Maker *maker, const Begun *begun, PyObject *output) {
    if (TYPE(output) == entry.host.tensor)
        return made(maker, begun, output);
    int is_right = TYPE(output) == &PyTuple_Type && PyTuple_Size(output) <= OUTPUTS;
    for (Py_ssize_t i = 0; is_right && i < PyTuple_Size(output); i++) {
        PyObject *one = PyTuple_GetItem(output, i);
        is_right = one == &_Py_NoneStruct || (TYPE(one) == entry.host.tensor && made(maker, begun, one));
    }
    return is_right;
}

static Flow *flow_of(const Begun *begun, PyObject *state, PyObject *module, uint64_t number, uintptr_t key, Py_ssize_t outputs) {
    const Count *counted = begun->wants & ADDS ? still(key, number) : NULL;
    size_t back = counted ? counted->back : 0, grads = (size_t)(begun->count + outputs);
    Flow *flow = PyMem_RawCalloc(1, sizeof *flow + grads * sizeof *flow->grads + back * sizeof *flow->times);
    if (!flow)
        return NULL;
    flow->back = back, flow->times = (double *)(flow->grads + grads);
    for (size_t i = 0; i < back; i++) {
        const double *standing = counted->totals[counted->count + i].standing;
        flow->times[i] = standing[IS_ON] ? standing[STEPS] : 0.0;
    }
    flow->refs = 1, flow->key = key, flow->number = number, flow->low = begun->sequence, flow->ordinal = ++entry.ordinal, flow->maker = (uintptr_t)state, flow->wants = begun->wants, flow->inputs = begun->count, flow->outputs = outputs;
    Py_IncRef(flow->module = module);
    Py_IncRef(flow->listeners = begun->listeners);
    return flow;
}

/* Convert the state that C has noted to Python's form. NULL: an exception is set. */
static PyObject *entered_of(const Begun *begun, PyObject *state) {
    PyObject *edges = PyList_New(0), *sequence = PyLong_FromUnsignedLongLong(begun->sequence), *result = NULL;
    int is_right = edges && sequence;
    for (int i = 0; i < begun->count && is_right; i++) {
        PyObject *node = begun->edges[i].node, *pair = node ? PyTuple_New(2) : &_Py_NoneStruct;
        if (node && pair) {
            Py_IncRef(node);
            PyTuple_SetItem(pair, 0, node);
            PyTuple_SetItem(pair, 1, PyLong_FromLongLong(begun->edges[i].nr));
        }
        is_right = pair && !PyList_Append(edges, pair);
        if (node && pair)
            Py_DecRef(pair);
    }
    PyObject *given[4] = {NULL, state, sequence, edges};
    if (is_right)
        result = asking(state, entry.host.graph_enters, given + 1, 3);
    for (size_t i = 2; i < sizeof given / sizeof *given; i++)
        if (given[i])
            Py_DecRef(given[i]);
    return result;
}

/* Let Python hook the graph. Return -1 if an exception is set. */
static int ends_in_python(Begun *begun, PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *output) {
    if (!begun->entered && !(begun->entered = entered_of(begun, state)))
        return -1;
    PyObject *given[5] = {NULL, module, packed(args + 1, count - 1), output, begun->entered};
    PyObject *done = given[2] ? asking(state, entry.host.graph_ends, given + 1, 4) : NULL;
    if (given[2])
        Py_DecRef(given[2]);
    if (done)
        Py_DecRef(done);
    return done ? 0 : -1;
}

/* Hook the nodes that a call's gradients flow through. Return 0 if it failed; an exception may be set. */
static int flows(const Begun *begun, PyObject *state, PyObject *module, uint64_t number, uintptr_t key, const Maker *maker) {
    Flow *flow = flow_of(begun, state, module, number, key, maker->outputs);
    int was_seen = hide(state), is_right = flow && hooked(flow, begun, maker->node, maker->number, maker->slots, maker->count);
    show(state, was_seen);
    if (flow)
        dropped(flow);
    return is_right;
}

/* Hook the nodes that a call has made; `number` is that of its module's `Count`. Return -1 if an exception is set, a
 * signal handler's. */
int graph_ends(Begun *begun, PyObject *state, PyObject *module, uint64_t number, PyObject *const *args, Py_ssize_t count, PyObject *output) {
    if (!entry.counts)
        return 0;
    int64_t since = now();
    Maker maker = {0};
    int has_raised = 0;
    if (begun->entered || !may_ask() || !found(&maker, begun, output)) {
        PyErr_Clear();
        has_raised = ends_in_python(begun, state, module, args, count, output);
        since = now();
    } else if (maker.node) {
        int is_right = begun->is_probed ? spans_end(begun, state, maker.node, maker.number, (uintptr_t)args[0], number)
                                        : flows(begun, state, module, number, (uintptr_t)args[0], &maker);
        if (!is_right && PyErr_Occurred())
            has_raised = failed(state);
    }
    if (maker.node)
        Py_DecRef(maker.node);
    lose(state, since);
    return has_raised;
}

/* -- in the backward */

/* Whether any of the gradients is not known to be finite. */
static int any_is_bad(PyObject *const *grads, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (grads[i] && !is_finite(grads[i]))
            return 1;
    return 0;
}

static PyObject *tuple_of(PyObject *const *grads, Py_ssize_t count) {
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; i < count && tuple; i++) {
        PyObject *one = grads[i] ? grads[i] : &_Py_NoneStruct;
        Py_IncRef(one);
        PyTuple_SetItem(tuple, i, one);
    }
    return tuple;
}

/* Call the listeners to the gradients that have entered, or left. Return -1 if an exception is set, which is not
 * hookd's. */
static int notify_flow(Flow *flow, PyObject *state, int has_left, int64_t elapsed, int64_t self) {
    int always = has_left ? HEARS : HEARS_BEFORE, if_bad = has_left ? CHECKS : CHECKS_BEFORE;
    int is_new = !has_left || !(flow->wants & CHECKS_BEFORE); /* whether the outputs' gradients have not been checked yet */
    if (flow->wants & if_bad && !flow->is_bad)
        flow->is_bad = any_is_bad(flow->grads + (is_new ? 0 : flow->outputs), has_left ? flow->inputs + (is_new ? flow->outputs : 0) : flow->outputs);
    if (!(flow->wants & always) && !(flow->wants & if_bad && flow->is_bad))
        return 0;
    int64_t since = now();
    PyObject *bad = flow->is_bad ? &_Py_TrueStruct : &_Py_FalseStruct, *left_now = has_left ? &_Py_TrueStruct : &_Py_FalseStruct;
    PyObject *given[9] = {NULL, flow->module, flow->listeners, left_now, bad, tuple_of(flow->grads + flow->outputs, flow->inputs),
                          tuple_of(flow->grads, flow->outputs), PyLong_FromLongLong(elapsed), PyLong_FromLongLong(self)};
    PyObject *done = given[5] && given[6] && given[7] && given[8] ? asking(state, entry.host.graph_notifies, given + 1, 8) : NULL;
    for (size_t i = 5; i < sizeof given / sizeof *given; i++)
        if (given[i])
            Py_DecRef(given[i]);
    if (done)
        Py_DecRef(done);
    if (entry.metered)
        entry.hooked -= now() - since; /* Python charges this time itself */
    return done ? 0 : -1;
}

/* Begin a backward. Return 0 if an exception is set. */
static int opened(Flow *flow, const Hook *hook, PyObject *state, int64_t now_ns) {
    const Host *host = &entry.host;
    flow->due_out = 1, flow->due_in = hook->own;
    for (Py_ssize_t i = 0; i < PyTuple_Size(hook->later); i++) {
        PyObject *node = PyTuple_GetItem(hook->later, i), *answer = PyObject_Vectorcall(host->will_run, &node, 1, NULL);
        if (!answer)
            return 0;
        flow->due_in += answer == &_Py_TrueStruct;
        Py_DecRef(answer);
    }
    Py_IncRef(state);
    PyObject *before = flow->thread;
    flow->thread = state, flow->is_open = 1, flow->is_bad = 0;
    flow->since = (Since){now_ns, whole(*at(state, host->inner)), whole(*at(state, host->lost)), whole(*at(state, host->recomputed))};
    spans_since(state, flow->maker, flow->low, flow->ordinal, &flow->since);
    if (before)
        Py_DecRef(before);
    return 1;
}

/* End a backward: take the time, call listeners, and forget the gradients. The next backward (retain_graph) begins
 * anew. Return -1 if an exception is set. */
static int finished(Flow *flow, PyObject *state, int64_t now_ns) {
    const Host *host = &entry.host;
    spans_close(state, flow->maker, flow->low, flow->ordinal, now_ns);
    int64_t spent = now_ns - flow->since.started, elapsed = spent, self = spent;
    if (state == flow->thread) {
        spent -= whole(*at(state, host->lost)) - flow->since.lost;
        elapsed = spent - (whole(*at(state, host->recomputed)) - flow->since.recomputed);
        self = spent - (whole(*at(state, host->inner)) - flow->since.inner);
        set_to(at(state, host->inner), PyLong_FromLongLong(flow->since.inner + spent));
    }
    self = self > 0 ? self : 0;
    const Count *counted = flow->back ? still(flow->key, flow->number) : NULL;
    for (size_t i = 0; counted && i < flow->back; i++) {
        const Totals *totals = &counted->totals[counted->count + i];
        if (flow->times[i] > 0 && totals->standing[IS_ACTIVE])
            add_to(totals, flow->times[i], elapsed, self);
    }
    int has_raised = notify_flow(flow, state, 1, elapsed, self);
    flow->is_open = 0;
    for (Py_ssize_t i = 0; i < flow->inputs + flow->outputs; i++) {
        PyObject *grad = flow->grads[i];
        flow->grads[i] = NULL;
        if (grad)
            Py_DecRef(grad);
    }
    return has_raised;
}

/* Take the gradients that a node is about to get. Return 0 if an exception is set. */
static int before(const Hook *hook, PyObject *state, PyObject *grads, int64_t now_ns) {
    Flow *flow = hook->flow;
    if (!flow->is_open && !opened(flow, hook, state, now_ns))
        return 0;
    for (Py_ssize_t i = 0; i < hook->count && flow->wants & KEEPS_OUT; i++) {
        PyObject *grad = PyTuple_GetItem(grads, hook->places[i].at), **place = &flow->grads[hook->places[i].tensor], *old = *place;
        if (!grad)
            return 0;
        *place = grad == &_Py_NoneStruct ? NULL : grad;
        if (*place)
            Py_IncRef(*place);
        if (old)
            Py_DecRef(old);
    }
    if (--flow->due_out)
        return 1;
    return !notify_flow(flow, state, 0, now() - flow->since.started, 0) && (flow->due_in || !finished(flow, state, now_ns));
}

/* Add a share of a gradient, which is stolen, to another one. NULL: an exception is set. */
static PyObject *sum_of(PyObject *state, PyObject *one, PyObject *share) {
    PyObject *given[3] = {NULL, one, share};
    Py_IncRef(one); /* torch releases the GIL, and another thread may run through the same graph */
    PyObject *sum = asking(state, entry.host.graph_adds, given + 1, 2);
    Py_DecRef(one);
    Py_DecRef(share);
    return sum;
}

/* Take the gradients that a node has computed for inputs: shares of the inputs' gradients. Return 0 if an exception is
 * set. */
static int behind(const Hook *hook, PyObject *state, PyObject *grads, int64_t now_ns) {
    Flow *flow = hook->flow;
    if (!flow->is_open)
        return 1;
    for (Py_ssize_t i = 0; i < hook->count && flow->wants & KEEPS_IN; i++) {
        PyObject *share = PyTuple_GetItem(grads, hook->places[i].at), **place = &flow->grads[flow->outputs + hook->places[i].tensor];
        if (!share)
            return 0;
        if (share == &_Py_NoneStruct)
            continue;
        Py_IncRef(share);
        if (*place && !(share = sum_of(state, *place, share)))
            return 0;
        PyObject *old = *place; /* another thread may have changed it in the meantime */
        *place = share;
        if (old)
            Py_DecRef(old);
    }
    return --flow->due_in || !finished(flow, state, now_ns);
}

/* Take the gradients that flow through a node. Return 0 if an exception is set. */
static int flowing(const Hook *hook, PyObject *state, PyObject *given, int64_t now_ns) {
    Flow *flow = hook->flow;
    flow->refs++;
    PyObject *grads = PyTuple_GetItem(given, 0);
    int is_right = grads && (hook->is_before ? before : behind)(hook, state, grads, now_ns);
    dropped(flow);
    return is_right;
}

/* Called by `host.hooked` with a capsule and the gradients that torch passes to the hook: one tuple before a node, two
 * after it. */
static PyObject *called(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    int64_t now_ns = now();
    PyObject *state = count == 2 && entry.counts ? here() : NULL;
    int is_right = 1;
    entry.inside++;
    if (state) {
        Py_IncRef(state);
        if (!spans_called(args[0], state, now_ns))
            is_right = flowing(PyCapsule_GetPointer(args[0], NAME), state, args[1], now_ns);
        if (!is_right)
            is_right = !failed(state);
        if (entry.counts)
            lose(state, now_ns);
        Py_DecRef(state);
    }
    entry.inside--;
    if (!is_right)
        return NULL;
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}

/* Return the function that runs when a hook is called. */
EXPORTED PyObject *hookd_entry_graph(void) { return method(NAME, called); }

/* Set the listeners to the gradients of a group. `listeners`: a list that nobody changes; None: no listeners. */
EXPORTED int hookd_entry_listen_flows(size_t group, PyObject *listeners, int wants) {
    if (group >= GROUPS)
        return 0;
    PyObject *old = entry.listeners[group];
    entry.listeners[group] = listeners == &_Py_NoneStruct ? NULL : listeners, entry.wants[group] = wants;
    if (entry.listeners[group])
        Py_IncRef(listeners);
    if (old)
        Py_DecRef(old);
    return 0;
}
