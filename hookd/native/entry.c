/* The entry: a C function that replaces the one that runs when Python calls `nn.Module.__call__`.
 *
 * A Python function object has a field `vectorcall`, and `module(x)` calls `__call__` through it. This file replaces
 * that field of torch's own function and nothing else: the function stays in its class, and its code, which
 * torch.compile reads, stays as it is. The entry looks the module up by its address. A module that is not observed is
 * called straight through, without a Python frame. A call whose listeners change nothing is counted in C, and the
 * Python functions that listen to it are called. For any other module its plan, a Python method
 * (hookd/target/entry/plan.py), is called with (module, args, kwargs).
 *
 * Every function here runs with the GIL held; all threads share the state. The prototypes are written by hand, so that
 * one file works with CPython 3.10 to 3.14: all of these functions are exported there, except that some versions lack
 * those declared weak. From libc it calls only the clock.
 *
 * Source: Objects/call.c `_PyObject_VectorcallTstate`, Objects/funcobject.c `PyFunction_SetVectorcall`, 3.14.
 */
#include "entry.h"

struct State entry;

static size_t hash(uintptr_t key) { return (size_t)(((key >> 4) * 0x9E3779B97F4A7C15ull) >> 20); }

static Slot *find(uintptr_t key) {
    for (size_t at = hash(key) & entry.mask;; at = (at + 1) & entry.mask) {
        Slot *slot = &entry.slots[at];
        if (slot->key == key || !slot->key)
            return slot->key ? slot : NULL;
    }
}

/* The `Count` from the beginning of a call may be gone at its end: after a detach, or a change of another plugin. */
Count *still(uintptr_t key, uint64_t number) {
    Slot *slot = entry.slots && entry.counts ? find(key) : NULL;
    return slot && slot->counted && slot->counted->number == number ? slot->counted : NULL;
}

/* The same without a search, if no `Count` was freed since `freed` was read. */
static inline Count *same(Count *counted, uint64_t freed, uintptr_t key, uint64_t number) {
    return entry.freed == freed ? counted : still(key, number);
}

/* Add a call or a backward that represents `times` of them. `elapsed` and `self` are ns. */
void add_to(const Totals *totals, double times, int64_t elapsed, int64_t self) {
    if (totals->seconds)
        *totals->seconds += (double)elapsed * 1e-9 * times;
    if (totals->own)
        *totals->own += (double)self * 1e-9 * times;
    if (totals->calls)
        *totals->calls += times;
}

/* Record a call. The recorder has all calls of a metered step. The same as `PageWriter.record`
 * (hookd/wire/page/writer.py). */
static void recorded(double module, double step) {
    const Host *host = &entry.host;
    PyObject *number = PyObject_Vectorcall(host->next_seq, NULL, 0, NULL); /* shared with the recorder's other writers */
    long long seq = number ? PyLong_AsLongLong(number) : 0;
    if (number)
        Py_DecRef(number);
    if (seq < 1) {
        PyErr_Clear();
        return;
    }
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    double *record = host->cells + host->ring + 6 * ((size_t)(seq - 1) % host->records);
    record[0] = 0.0; /* invalid until it is complete */
    __atomic_thread_fence(__ATOMIC_RELEASE);
    record[1] = (double)time.tv_sec + (double)time.tv_nsec * 1e-9, record[2] = (double)host->kind, record[3] = module, record[4] = step, record[5] = 0.0;
    __atomic_thread_fence(__ATOMIC_RELEASE);
    record[0] = (double)seq;
}

/* Whether a module is on a stack `(module, outer stack, number)`: its time is then part of the outer call's. */
static int is_inside(PyObject *top, PyObject *module) {
    for (; top != &_Py_NoneStruct; top = PyTuple_GetItem(top, 1))
        if (PyTuple_GetItem(top, 0) == module)
            return 1;
    return 0;
}

/* The part of a metered step's time that is accounted for separately, in ns. */
static int64_t apart(void) { return entry.hooked + entry.shown + entry.looked + entry.charged; }

/* Add the time between two moments of a metered step to the time spent in this library, without the part that is
 * accounted for separately. `others` is the value of `apart` at the first moment. All threads share it, so another
 * thread may have added more to it than the time between the two moments. */
static void spent_between(int64_t begun, int64_t ended, int64_t others) {
    int64_t spent = ended - begun - (apart() - others);
    entry.spent += spent > 0 ? spent : 0;
}

/* Call a module that is nested in another observed one, and count the call: the same as its plan, for listeners that
 * change nothing. */
static PyObject *counting(Count *counted, PyObject *state, PyObject *const *args, size_t nargsf, PyObject *names) {
    const Host *host = &entry.host;
    int is_metered = entry.metered;
    int64_t begun = is_metered ? now() : 0;
    uintptr_t key = (uintptr_t)args[0];
    uint64_t number = counted->number, freed = entry.freed;
    size_t group = counted->group;
    double value = counted->value;
    int is_timed = counted->is_timed, is_clocked = is_timed || is_metered, has_raised = 0;
    Count *const first = counted;
    Py_ssize_t given = (Py_ssize_t)(nargsf & ~OFFSET);
    PyObject *module = counted->module, *cell = counted->cell;
    Py_IncRef(state), Py_IncRef(module), Py_IncRef(module), Py_IncRef(cell);
    /* Up to CPython 3.11 a new tuple may trigger a garbage collection, which may run any code: `counted` may be gone
     * after it. */
    PyObject *mine = PyTuple_New(3), **top = at(state, host->top), *outer = *top;
    counted = mine ? same(first, freed, key, number) : NULL;
    if (!counted) {
        Py_DecRef(state), Py_DecRef(module), Py_DecRef(module), Py_DecRef(cell);
        if (mine)
            Py_DecRef(mine);
        return mine ? through(state, args, nargsf, names) : NULL;
    }
    Py_IncRef(outer);
    PyTuple_SetItem(mine, 0, module), PyTuple_SetItem(mine, 1, outer), PyTuple_SetItem(mine, 2, cell);
    *top = mine; /* its reference to `outer` is ours now */
    size_t beat = (size_t)PyLong_AsLongLong(*at(state, host->beat));
    long long inner = is_timed ? PyLong_AsLongLong(*at(state, host->inner)) : 0;
    host->cells[beat] = value;
    if (is_metered)
        recorded(value, host->cells[beat + host->phase]);
    int64_t others = apart();
    PyObject *before = NULL;
    if (counted->checks && entry.checks && counted->is_away && entry.hands[group])
        has_raised = versions_of(state, args, given, names, &before); /* may run any code, also a signal handler's */
    else if (counted->checks && entry.checks)
        before = version_of(args, given, names);
    Notice notice = {0};
    has_raised = has_raised || (entry.listening[group].before && notify_before(&notice, group, state, module, args, given, names));
    Begun graph; /* a large struct: initialized only if it is used */
    int is_hooked = entry.listeners[group] && !has_raised;
    graph.listeners = NULL;
    if (is_hooked)
        has_raised = graph_begins(&graph, group, state, args, given);
    int64_t started = is_clocked ? now() : 0;
    if (is_metered)
        spent_between(begun, started, others);
    PyObject *result = has_raised ? NULL : through(state, args, nargsf, names);
    int64_t ended = is_clocked ? now() : 0, returned = ended;
    others = apart();
    if (graph.listeners) /* without the time of hooks inside the call */
        ended -= PyLong_AsLongLong(*at(state, host->lost)) - graph.lost;
    counted = same(first, freed, key, number);
    /* If a plugin was loaded or unloaded in the meantime, all modules have a new `Count`. Listeners that were called
     * when this call began are called at its end all the same. */
    if (result && (counted || (notice.values && entry.counts))) {
        long long elapsed = ended - started, self = is_timed ? elapsed - PyLong_AsLongLong(*at(state, host->inner)) + inner : 0;
        int infers = counted && *at(state, host->infers) == &_Py_TrueStruct;
        const Totals *totals = infers ? counted->inferred : counted ? counted->totals : NULL;
        size_t count = infers ? counted->inferring : counted ? counted->count : 0;
        int is_nested = (count || notice.wants & WANTS_IS_NESTED) && is_inside(outer, module);
        for (size_t i = 0; i < count; i++)
            add_to(&totals[i], 1.0, is_nested ? 0 : elapsed, self);
        if (is_timed)
            set_to(at(state, host->inner), PyLong_FromLongLong(inner + elapsed));
        if (notify_after(&notice, state, result, elapsed, self, is_nested)) {
            Py_DecRef(result);
            result = NULL;
        }
        counted = same(first, freed, key, number); /* that may have run any code */
    }
    if (!result && (counted || (notice.values && entry.counts)))
        left(state, outer, module);
    set_to(top, outer);
    if (result && entry.counts)
        host->cells[beat] = PyFloat_AsDouble(PyTuple_GetItem(outer, 2));
    if (result && counted) {
        int is_ended = graph.listeners && !is_inside(outer, module) && graph_ends(&graph, state, module, number, args, given, result);
        counted = is_ended ? NULL : same(first, freed, key, number);
        int is_looked_at = counted && counted->checks && entry.checks, hands = is_looked_at && entry.hands[group];
        int found = is_looked_at ? looked_at(result, hands) : UNSEEN;
        counted = is_ended ? NULL : same(first, freed, key, number); /* checking or remembering the output may run any code */
        if (counted && hands && found == UNSEEN)
            counted->is_away = 1, is_ended = handed(state, module, args, given, names, result, before);
        else
            is_ended = is_ended || (counted && counted->remembers && remembered(state, module, args, given, names, result, found));
        counted = is_ended ? NULL : same(first, freed, key, number);
        is_ended = is_ended || (counted && counted->shows && show_output(counted, state, module, result));
        if (!is_ended && found == BAD && still(key, number))
            is_ended = suspected(state, module, args, given, names, result, before);
        if (is_ended) {
            Py_DecRef(result);
            result = NULL;
        }
        if (is_metered)
            spent_between(returned, now(), others);
    }
    if (is_hooked)
        graph_forgets(&graph);
    if (notice.before)
        forget_notice(&notice);
    if (before)
        Py_DecRef(before);
    Py_DecRef(module);
    Py_DecRef(state);
    return result;
}

/* Whether a call may be counted in C. An outermost call and a call in a backward need more; a call made by a plugin is
 * not part of the training. */
static int may_count(const Count *counted, PyObject *state) {
    const Host *host = &entry.host;
    return counted && state && !entry.uses_plans[counted->group] && *at(state, host->top) != &_Py_NoneStruct &&
           *at(state, host->busy) == &_Py_FalseStruct && *at(state, host->backwards) == entry.zero &&
           (counted->inferred || !counted->count || *at(state, host->infers) == &_Py_FalseStruct);
}

/* Whether so few levels are left that a call of hookd's could raise a RecursionError, which would hit the training. */
static int is_near_limit(void) {
    const Depth *depth = &entry.depth;
    if (!depth->offset)
        return 0;
    int found = *(const int *)((const char *)PyThreadState_Get() + depth->offset);
    return (depth->is_counted_up ? depth->limit - found : found) < depth->room;
}

/* Whether a call is so deep in the stack that the stack space that hookd takes (half a kilobyte per observed call)
 * could be missing in the end. The outermost call notes the address of the stack, and whether a profiler listens:
 * asking at each call would be expensive. */
static int is_deep(PyObject *state) {
    const Host *host = &entry.host;
    if (!state)
        return 0;
    long long now = (long long)(uintptr_t)__builtin_frame_address(0);
    if (*at(state, host->top) != &_Py_NoneStruct)
        return PyLong_AsLongLong(*at(state, host->base)) - now > STACK;
    set_to(at(state, host->base), PyLong_FromLongLong(now));
    entry.first_thread = UINT64_MAX, entry.last = NULL; /* its nodes are unknown yet; its state may have the address of that of a thread that has ended */
    spans_outermost(state);
    PyObject *profiled = is_profiled() ? &_Py_TrueStruct : &_Py_FalseStruct;
    Py_IncRef(profiled);
    set_to(at(state, host->profiled), profiled);
    return 0;
}

static PyObject *enter(PyObject *function, PyObject *const *args, size_t nargsf, PyObject *names) {
    Py_ssize_t count = (Py_ssize_t)(nargsf & ~OFFSET);
    PyObject *state = here(), *result; /* before the slot is found: this may run code that moves it */
    if (!entry.slots || count < 1) /* stopped after a caller had read the field; or called without a module */
        return entry.standard(function, args, nargsf, names);
    Slot *slot = find((uintptr_t)args[0]);
    int is_observed = !slot || slot->plan, is_last = is_observed && is_near_limit();
    if (is_observed && !is_last && is_deep(state)) {
        entry.deep++;
        return entry.standard(function, args, nargsf, names); /* a tail call: it takes no stack space */
    }
    entry.inside++;
    if (is_last) /* one level less than without hookd: compensates for the level that the outermost call takes */
        entry.deep++, result = through(state, args, nargsf, names);
    else if (!is_observed)
        result = through(state, args, nargsf, names);
    else if (slot && may_count(slot->counted, state))
        result = counting(slot->counted, state, args, nargsf, names);
    else
        result = planned(state, slot ? slot->plan : entry.missing, args, count, names);
    entry.inside--;
    return result;
}

/* The function's vectorcall field: the word behind the object's head that holds what `PyVectorcall_Function` returns. */
static Vectorcall *field(PyObject *function, size_t size) {
    Vectorcall now = PyVectorcall_Function(function);
    Vectorcall *words = (Vectorcall *)function;
    for (size_t at = 2; at < size / sizeof *words; at++)
        if (words[at] == now)
            return &words[at];
    return NULL;
}

static int set(PyObject *function, size_t size, Vectorcall to) {
    if (PyFunction_SetVectorcall) { /* also resets specialized call sites */
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

/* Return the version of this interface, for the loader. */
EXPORTED int hookd_entry_version(void) { return VERSION; }

/* Prepare to enter `call`. `plain` is any unmodified Python function. Return -1 if another tool has replaced the entry
 * of `call`, or there is no memory. */
EXPORTED int hookd_entry_start(PyObject *call, PyObject *plain, PyObject *missing) {
    entry.standard = PyVectorcall_Function(plain);
    if (PyVectorcall_Function(call) != entry.standard)
        return -1;
    entry.compiled = PyUnicode_InternFromString("_compiled_call_impl");
    entry.impl = PyUnicode_InternFromString("_call_impl");
    if (!entry.compiled || !entry.impl || grown(LEAST))
        return -1;
    Py_IncRef(entry.missing = missing);
    return 0;
}

/* Enter a Python function. Return -1 if another tool has replaced its entry, or there is no such field. */
EXPORTED int hookd_entry_watch(PyObject *function, size_t size) {
    if (PyVectorcall_Function(function) != entry.standard || set(function, size, enter))
        return -1;
    entry.watched = 1;
    return 0;
}

/* Restore a function's own entry. Return -1 if its entry is not ours; it then stays as it is. */
EXPORTED int hookd_entry_unwatch(PyObject *function, size_t size) {
    if (PyVectorcall_Function(function) == enter && !set(function, size, entry.standard))
        entry.watched = 0;
    return -entry.watched;
}

static void uncounted(Slot *slot) {
    Count *counted = slot->counted;
    slot->counted = NULL;
    if (counted) {
        entry.freed++;
        Py_DecRef(counted->module);
        Py_DecRef(counted->cell);
        PyMem_RawFree(counted->shown);
        PyMem_RawFree(counted->inferred);
        PyMem_RawFree(counted);
    }
}

/* Set a slot. Objects freed by this may run any code, which may move the slot. */
static void put(Slot *slot, uintptr_t key, PyObject *plan) {
    PyObject *old = slot->plan;
    if (plan)
        Py_IncRef(plan);
    slot->key = key, slot->plan = plan;
    uncounted(slot);
    if (old)
        Py_DecRef(old);
}

/* Set a module's plan; NULL: the module is called straight through. Return -1 if there is no memory. */
EXPORTED int hookd_entry_put(uintptr_t key, PyObject *plan) {
    size_t size = entry.mask + 1; /* half of the slots stay free; many of the filled ones may be unused by now */
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

/* Return totals with three indices of cells, -1 for one that is not wanted. */
static Totals totals_at(const int64_t *cells, const double *standing) {
    double *of[3];
    for (size_t i = 0; i < 3; i++)
        of[i] = cells[i] < 0 ? NULL : entry.host.cells + cells[i];
    return (Totals){of[0], of[1], of[2], standing};
}

/* Count the calls of a module that has a plan here, unless its group uses plans. `cells` has three indices for each of
 * `count` totals of its calls and of `back` totals of its backward, -1 for one that is not wanted. `places` has arrays
 * that live as long as the plan: the `standing` of each of the `back` totals, then both fields of `Shown` for each of
 * `shows`. Return -1 if there is no memory. */
EXPORTED int hookd_entry_count(uintptr_t key, PyObject *module, PyObject *cell, size_t group, int remembers, int checks, int is_timed,
                               size_t count, size_t back, size_t shows, const int64_t *cells, double *const *places) {
    Slot *slot = find(key);
    if (!slot || !entry.counts || group >= GROUPS)
        return 0;
    Count *counted = PyMem_RawCalloc(1, sizeof *counted + (count + back) * sizeof *counted->totals);
    if (!counted)
        return -1;
    Shown *shown = shows ? PyMem_RawCalloc(shows, sizeof *shown) : NULL;
    if (shows && !shown) {
        PyMem_RawFree(counted);
        return -1;
    }
    *counted = (Count){++entry.numbers, module, cell, PyFloat_AsDouble(cell), group, remembers, checks, 0, is_timed, count, back, shows, shown, NULL, 0};
    Py_IncRef(module);
    Py_IncRef(cell);
    for (size_t i = 0; i < count + back; i++)
        counted->totals[i] = totals_at(cells + 3 * i, i < count ? NULL : places[i - count]);
    for (size_t i = 0; i < shows; i++)
        shown[i] = (Shown){places[back + 2 * i], places[back + 2 * i + 1]};
    uncounted(slot);
    slot->counted = counted;
    return 0;
}

/* Count a module's calls of inference too, in `count` totals, each with three indices in `cells`. Return -1 if there is
 * no memory. */
EXPORTED int hookd_entry_infer(uintptr_t key, size_t count, const int64_t *cells) {
    Slot *slot = find(key);
    Count *counted = slot && entry.counts ? slot->counted : NULL;
    if (!counted || counted->inferred)
        return 0;
    Totals *totals = PyMem_RawCalloc(count, sizeof *totals); /* not NULL for a count of 0 */
    if (!totals)
        return -1;
    for (size_t i = 0; i < count; i++)
        totals[i] = totals_at(cells + 3 * i, NULL);
    counted->inferred = totals, counted->inferring = count;
    return 0;
}

/* Copy the first `count` numbers of the interpreter's state of the calling thread. */
EXPORTED int hookd_entry_look(int *into, size_t count) {
    const int *from = PyThreadState_Get();
    for (size_t i = 0; i < count; i++)
        into[i] = from[i];
    return 0;
}

/* Do not observe calls that have fewer than `room` levels left. */
EXPORTED int hookd_entry_depth(size_t offset, int is_counted_up, int limit, int room) {
    entry.depth = (Depth){offset, is_counted_up, limit, room};
    return 0;
}

/* Return how many calls were not observed for that reason since the last time. */
EXPORTED int hookd_entry_deep(void) {
    long deep = entry.deep;
    entry.deep = 0;
    return deep > 1 << 30 ? 1 << 30 : (int)deep;
}

/* Let the calls of a group go through their plans, or count them in C. */
EXPORTED int hookd_entry_use_plans(size_t group, int uses_plans) {
    if (group < GROUPS)
        entry.uses_plans[group] = uses_plans != 0;
    return 0;
}

/* `check(checks, alert)`: set whether outputs are checked from now on, and whether Python is called for all of them.
 * Return the number of calls since the last time whose output nobody could check. */
static PyObject *check(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    long passed = entry.passed;
    (void)self;
    if (count == 2)
        entry.checks = args[0] == &_Py_TrueStruct && entry.host.gate, entry.alert = args[1] == &_Py_TrueStruct, entry.passed = 0;
    return PyLong_FromLongLong(passed);
}

/* Read plain tensors with this layout from now on. */
EXPORTED int hookd_entry_layout(const Layout *layout) {
    entry.layout = *layout;
    return 0;
}

/* Set whether large outputs of a group are checked too, and whether Python checks those that C cannot. */
EXPORTED int hookd_entry_hand(size_t group, int hands) {
    if (group < GROUPS)
        entry.hands[group] = hands != 0;
    return 0;
}

/* `meter(is_metered)`: set whether calls are metered from now on. */
static PyObject *meter(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    entry.metered = count && args[0] == &_Py_TrueStruct;
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}

/* `next_ordinal()`: return the ordinal of a call that returns, see spans.c. `close_spans(thread, low, ordinal, ended)`: see `spans_close`; if `ended`
 * is from another clock, the end is now. The other numbers come from this library. */
static PyObject *next_ordinal(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self, (void)args, (void)count;
    return PyLong_FromUnsignedLongLong(++entry.ordinal);
}

static PyObject *close_spans(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    PyObject *state = count == 4 ? here() : NULL;
    if (state) {
        enum { MOST = 1000000000 }; /* ns */
        int64_t time = now(), ended = PyLong_AsLongLong(args[3]);
        int is_ours = ended <= time && time - ended < MOST;
        spans_close(state, PyLong_AsUnsignedLongLong(args[0]), PyLong_AsUnsignedLongLong(args[1]), PyLong_AsUnsignedLongLong(args[2]), is_ours ? ended : time);
    }
    PyErr_Clear();
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}

/* `since_span(thread, low, ordinal)`: see `spans_since`. Return a tuple of the ns since then and the thread's times at
 * that moment; None if nothing is open. */
static PyObject *since_span(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    PyObject *state = count == 3 ? here() : NULL;
    Since since = {0};
    int is_found = state && spans_since(state, PyLong_AsUnsignedLongLong(args[0]), PyLong_AsUnsignedLongLong(args[1]), PyLong_AsUnsignedLongLong(args[2]), &since);
    PyErr_Clear();
    PyObject *answer = is_found ? PyTuple_New(4) : &_Py_NoneStruct;
    int64_t numbers[] = {now() - since.started, since.inner, since.lost, since.recomputed};
    if (!is_found)
        Py_IncRef(answer);
    for (Py_ssize_t i = 0; answer && is_found && i < 4; i++)
        PyTuple_SetItem(answer, i, PyLong_FromLongLong(numbers[i]));
    return answer;
}

/* Return a tuple of the functions that Python calls at every step; they take positional arguments only. */
EXPORTED PyObject *hookd_entry_methods(void) {
    static const struct { const char *name; Method call; } MADE[] = {
        {"check", check}, {"meter", meter}, {"let_go", let_go}, {"largest", largest_of}, {"number", only_number}, {"digest", digest_of}, {"quiet", quiet}, {"leave", leave}, {"next_ordinal", next_ordinal}, {"close_spans", close_spans}, {"since_span", since_span}, {"walk", walk_from},
    };
    enum { MANY = sizeof MADE / sizeof *MADE };
    PyObject *found = PyTuple_New(MANY);
    for (Py_ssize_t i = 0; found && i < MANY; i++) {
        PyObject *one = method(MADE[i].name, MADE[i].call);
        if (one)
            PyTuple_SetItem(found, i, one);
        else
            Py_DecRef(found), found = NULL;
    }
    return found;
}

/* Store the ns spent since the last time: in metered calls, in hooks on graphs, on showing outputs, and on checking
 * large ones. */
EXPORTED int hookd_entry_spent(int64_t *spent) {
    spent[0] = entry.spent, spent[1] = entry.hooked, spent[2] = entry.shown, spent[3] = entry.looked;
    entry.spent = entry.hooked = entry.shown = entry.looked = entry.charged = 0;
    return 0;
}

/* The objects of `host`, which are its first fields. */
enum { OBJECTS = offsetof(Host, dtypes) / sizeof(PyObject *) };
static PyObject **objects(void) { return (PyObject **)&entry.host; }

static const struct { PyObject **at; const char *text; } WORDS[] = {
    {&entry.thread_name, "thread"},         {&entry.version_name, "_version"},      {&entry.numel_name, "numel"},
    {&entry.leaf_name, "is_leaf"},          {&entry.storage_name, "untyped_storage"}, {&entry.offset_name, "storage_offset"},
    {&entry.address_name, "data_ptr"},      {&entry.nbytes_name, "nbytes"},         {&entry.resizable_name, "resizable"},
    {&entry.dtype_name, "dtype"},           {&entry.contiguous_name, "is_contiguous"}, {&entry.host_name, "is_cpu"},
    {&entry.shape_name, "shape"},           {&entry.stride_name, "stride"},         {&entry.grad_name, "grad"},
    {&entry.node_name, "grad_fn"},          {&entry.nr_name, "output_nr"},          {&entry.learns_name, "requires_grad"},
    {&entry.sequence_name, "_sequence_nr"}, {&entry.following_name, "next_functions"}, {&entry.prehook_name, "register_prehook"},
    {&entry.hook_name, "register_hook"},    {&entry.hooks_name, "_backward_hooks"}, {&entry.dict_name, "_register_hook_dict"},
    {&entry.compiling_name, "_is_compiling_flag"}, {&entry.initialized_name, "_initialized"},
    {&entry.enter_name, "__enter__"},       {&entry.exit_name, "__exit__"},
};

/* Count calls in C from now on, with the objects of `host`. */
EXPORTED int hookd_entry_host(const Host *host) {
    entry.host = *host;
    for (size_t i = 0; i < OBJECTS; i++)
        if (objects()[i])
            Py_IncRef(objects()[i]);
    entry.zero = PyLong_FromLongLong(0);
    entry.counts = entry.zero != NULL;
    for (size_t i = 0; i < sizeof WORDS / sizeof *WORDS; i++)
        entry.counts = (*WORDS[i].at = PyUnicode_InternFromString(WORDS[i].text)) && entry.counts;
    if (!entry.counts)
        PyErr_Clear();
    return 0;
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

/* Release everything. A call that still arrives here, through a field that could not be restored, is called straight
 * through. `handle` is the handle of this library. Return 1 while it must stay loaded: for such a field, for calls
 * that are inside, or for hooks in a graph that is still alive; the last of these hooks closes it. */
EXPORTED int hookd_entry_stop(void *handle) {
    hookd_entry_clear();
    PyMem_RawFree(entry.slots);
    entry.slots = NULL;
    spans_stop();
    entry.counts = 0;
    if (!entry.inside) { /* else they are used until the last call is over, and leak */
        for (size_t i = 0; i < OBJECTS; i++)
            if (objects()[i])
                Py_DecRef(objects()[i]);
        for (size_t i = 0; i < sizeof WORDS / sizeof *WORDS; i++)
            if (*WORDS[i].at)
                Py_DecRef(*WORDS[i].at);
        PyObject *made[] = {entry.state, entry.zero, entry.large};
        for (size_t i = 0; i < sizeof made / sizeof *made; i++)
            if (made[i])
                Py_DecRef(made[i]);
    }
    Py_DecRef(entry.missing);
    for (size_t group = 0; group < GROUPS; group++) {
        hookd_entry_listen_flows(group, &_Py_NoneStruct, 0);
        hookd_entry_listen_calls(group, &_Py_NoneStruct, &_Py_NoneStruct, 0);
    }
    if (!entry.inside && !entry.watched && entry.hooks)
        entry.handle = handle;
    return entry.inside || entry.watched || entry.hooks;
}
