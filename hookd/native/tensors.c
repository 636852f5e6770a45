/* What the entry does with tensors: reads plain ones in place, checks whether their numbers are finite, and remembers
 * the outputs of calls. */
#include "entry.h"

enum { BRIEF = 1 << 16 };   /* elements, a few microseconds' work; the same as in hookd/target/tensors/kernel.py */
enum { TOGETHER = 1 << 21 }; /* elements that are read, in about a millisecond, before other threads may take the GIL */

/* Whether tensors may be read through Python: no mode sees the access, and no trace records it. */
int may_ask(void) { return gives(entry.host.modes, entry.zero) && gives(entry.host.tracing, &_Py_NoneStruct); }

/* Whether a module has this attribute, and it is True. */
static int is_set(PyObject *module, PyObject *name) {
    PyObject *value = module ? PyObject_GetAttr(module, name) : NULL;
    if (!value)
        PyErr_Clear();
    else
        Py_DecRef(value); /* the module keeps it alive */
    return value == &_Py_TrueStruct;
}

/* `quiet(undo)`: do what `enter` of hookd/target/tensors/torch_state.py does in the usual state: nothing is traced,
 * compiled, transformed or captured, no mode sees operations, and autocast is off. A guard is appended to the list and
 * entered; no signal handler can run between the two, or before the list has the guard. Return whether the state was
 * usual; if False, Python has to do it. */
PyObject *quiet(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    const Host *host = &entry.host;
    (void)self;
    int is_usual = count == 1 && entry.counts && host->unseen && gives(host->tracing, &_Py_NoneStruct) && !is_set(host->compiler, entry.compiling_name) &&
                   gives(host->transforms, &_Py_NoneStruct) && gives(host->dispatching, entry.zero) && gives(host->autocast, &_Py_FalseStruct) &&
                   (!is_set(host->cuda, entry.initialized_name) || (host->capturing && gives(host->capturing, &_Py_FalseStruct)));
    PyObject *guard = is_usual ? PyObject_Vectorcall(host->unseen, NULL, 0, NULL) : NULL, *entered = NULL;
    if (guard && !PyList_Append(args[0], guard) && !(entered = PyObject_VectorcallMethod(entry.enter_name, &guard, 1, NULL)))
        PyList_SetSlice(args[0], PyList_Size(args[0]) - 1, PyList_Size(args[0]), NULL);
    PyObject *answer = entered ? &_Py_TrueStruct : &_Py_FalseStruct, *made[] = {guard, entered};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        if (made[i])
            Py_DecRef(made[i]);
    PyErr_Clear();
    Py_IncRef(answer);
    return answer;
}

/* `leave(undo)`: exit the guards of a list, the last one first; no signal handler can run in between. */
PyObject *leave(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    PyObject *type = NULL, *error = NULL, *trace = NULL, *nothing = &_Py_NoneStruct;
    (void)self;
    entry.inside++; /* a guard may be written in Python, and another thread may stop the entry meanwhile */
    for (Py_ssize_t size = count == 1 ? PyList_Size(args[0]) : 0; size > 0; size = PyList_Size(args[0])) {
        PyObject *guard = PyList_GetItem(args[0], size - 1), *given[] = {guard, nothing, nothing, nothing};
        Py_IncRef(guard);
        PyList_SetSlice(args[0], size - 1, size, NULL);
        PyObject *done = PyObject_VectorcallMethod(entry.exit_name, given, 4, NULL);
        if (done)
            Py_DecRef(done);
        else if (type)
            PyErr_Clear();
        else
            PyErr_Fetch(&type, &error, &trace);
        Py_DecRef(guard);
    }
    entry.inside--;
    if (type) {
        PyErr_Restore(type, error, trace);
        return NULL;
    }
    Py_IncRef(nothing);
    return nothing;
}

/* Return torch's data of a plain tensor, which can be read directly; NULL: the tensor has to be read through Python. A
 * tensor's keys tell everything that makes it special: its device and layout, a transform, a mode, the negative bit, a
 * subclass. */
const void *plain(PyObject *tensor) {
    const Layout *layout = &entry.layout;
    if (!layout->impl || TYPE(tensor) != entry.host.tensor)
        return NULL;
    const void *impl = FIELD(void *, tensor, layout->impl);
    return impl && FIELD(uint64_t, impl, layout->keys) == layout->plain ? impl : NULL;
}

static PyObject *version_in(const void *impl) {
    const void *version = FIELD(void *, impl, entry.layout.version);
    return version ? PyLong_FromLongLong(FIELD(uint32_t, version, entry.layout.count)) : NULL;
}

/* Keep a small output alive, for plugins that look at outputs only after something bad: the same as
 * `Portions.remember` (hookd/target/events/batching.py). Return 0 if the output does not qualify or something failed;
 * then nothing was kept, and no exception is set. */
static int kept(PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *output) {
    const Host *host = &entry.host;
    long long size = PyLong_AsLongLong(*at(state, host->kept));
    if (*at(module, host->waits) == entry.zero || size >= (long long)host->most || TYPE(output) != host->tensor)
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

/* Return the weak form of a call that `kept` has kept: (module, weak reference, version). NULL, with no exception set:
 * the call was not kept by `kept`, or its output may be a parameter or a buffer, which must not have a weak reference. */
static PyObject *weakly(PyObject *one) {
    if (TYPE(one) != &PyTuple_Type || PyTuple_Size(one) != 4)
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

/* Remember an output on a device, in the form that `weakly` returns. Its inputs are not kept: nobody looks at them,
 * because that would wait for the device. Return 0 as `kept` does. */
static int noted(PyObject *state, PyObject *module, PyObject *output) {
    const Host *host = &entry.host;
    long long size = PyLong_AsLongLong(*at(state, host->kept));
    if (TYPE(output) != host->tensor || size >= (long long)host->most || plain(output) || !may_ask())
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

/* Whether keeping a plain tensor keeps only little memory alive. The size of a tensor whose dtype kernel.c does not
 * check was never looked at, and a small tensor may be a view of a large one. */
static int is_small(const void *impl) {
    const void *storage = FIELD(void *, impl, entry.layout.storage);
    return storage && FIELD(int64_t, storage, entry.layout.nbytes) <= 8 * BRIEF;
}

/* Note a call that has returned a finite tensor. Nobody will look for something bad in it, so the list gets only the
 * module; a ring keeps the last outputs alive, for plugins that want to know what preceded something bad. Return 0 as
 * `kept` does. */
static int ringed(PyObject *state, PyObject *module, PyObject *output) {
    const Host *host = &entry.host;
    const void *impl = plain(output);
    PyObject *version = impl && is_small(impl) ? version_in(impl) : NULL, *list = *at(state, host->returned), *ring = *at(state, host->latest);
    if (version && PyList_Size(list) >= MOST_KNOWN) /* for a model that never returns, the last calls matter */
        PyList_SetSlice(list, 0, MOST_KNOWN / 2, NULL);
    if (!version || PyList_Append(list, module)) {
        PyErr_Clear();
        if (version)
            Py_DecRef(version);
        return 0;
    }
    long long newest = (PyLong_AsLongLong(*at(state, host->newest)) + 1) % RING;
    set_to(at(state, host->newest), PyLong_FromLongLong(newest)); /* first of all: objects freed below may run any code, which may call modules */
    if (*at(state, host->kept) == entry.zero)
        set_to(at(state, host->kept), PyLong_FromLongLong(1)); /* marks that there is something to let go */
    Py_IncRef(module), Py_IncRef(output), Py_IncRef(ring);
    PyList_SetItem(ring, 3 * newest, module), PyList_SetItem(ring, 3 * newest + 2, version), PyList_SetItem(ring, 3 * newest + 1, output);
    Py_DecRef(ring);
    return 1;
}

/* Replace the modules in the list by the calls of the ring, in the form of `kept`, and empty the ring. */
static void unrolled(PyObject *state, PyObject *list, PyObject *ring) {
    long long place = PyLong_AsLongLong(*at(state, entry.host.newest));
    Py_ssize_t left = RING;
    for (Py_ssize_t i = PyList_Size(list) - 1; i >= 0 && left && PyList_GetItem(ring, 3 * place) != &_Py_NoneStruct; i--) {
        PyObject *module = PyList_GetItem(ring, 3 * place);
        if (PyList_GetItem(list, i) != module)
            continue;
        PyObject *nothing = PyTuple_New(0), *one = nothing ? PyTuple_New(4) : NULL; /* may collect garbage, and so run any code */
        if (!one || i >= PyList_Size(list) || PyList_GetItem(list, i) != module || PyList_GetItem(ring, 3 * place) != module) {
            PyErr_Clear();
            left = 0;
        } else {
            PyObject *output = PyList_GetItem(ring, 3 * place + 1), *version = PyList_GetItem(ring, 3 * place + 2);
            Py_IncRef(module), Py_IncRef(nothing), Py_IncRef(output), Py_IncRef(version);
            PyTuple_SetItem(one, 0, module), PyTuple_SetItem(one, 1, nothing), PyTuple_SetItem(one, 2, output), PyTuple_SetItem(one, 3, version);
            Py_IncRef(one);
            PyList_SetItem(list, i, one);
            place = (place + RING - 1) % RING, left--;
        }
        if (nothing)
            Py_DecRef(nothing);
        if (one)
            Py_DecRef(one);
    }
    for (Py_ssize_t i = 0; i < 3 * RING; i++) {
        Py_IncRef(&_Py_NoneStruct);
        PyList_SetItem(ring, i, &_Py_NoneStruct);
    }
}

/* Remember the output of a call; `found` is the result of checking it. Return -1 if an exception is set, a signal
 * handler's. */
int remembered(PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names,
                      PyObject *output, int found) {
    if ((found == SEEN && ringed(state, module, output)) || kept(state, module, args, count, output) || noted(state, module, output))
        return 0;
    PyObject *given[6] = {NULL, state, module, NULL, NULL, output};
    PyObject *done = with_packed(state, entry.host.remember, given, 5, 3, args, count, names);
    if (done)
        Py_DecRef(done);
    return done ? 0 : -1;
}

static const int WIDTHS[4] = {4, 8, 2, 2};

/* Call a method of an object that returns an int. Return -1 if it raised; no exception is set. */
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

/* Return the number of elements from a tensor's first to its furthest one; -1 if it is unknown or more than `most`.
 * The elements in between may belong to other tensors, so something bad found there is only a suspicion. */
static long long span_of(PyObject *tensor, long long elements, long long most) {
    if (is_true(PyObject_VectorcallMethod(entry.contiguous_name, &tensor, 1, NULL)))
        return elements;
    PyObject *sizes = PyObject_GetAttr(tensor, entry.shape_name);
    PyObject *strides = sizes ? PyObject_VectorcallMethod(entry.stride_name, &tensor, 1, NULL) : NULL;
    long long span = strides ? 1 : -1;
    Py_ssize_t dims = strides ? PyTuple_Size(strides) : 0;
    for (Py_ssize_t i = 0; i < dims && span > 0; i++) {
        long long size = PyLong_AsLongLong(PyTuple_GetItem(sizes, i)), stride = PyLong_AsLongLong(PyTuple_GetItem(strides, i));
        int is_within = size == 1 || (size > 1 && stride >= 0 && stride <= (most - span) / (size - 1));
        span = is_within ? span + (size - 1) * stride : -1;
    }
    if (sizes)
        Py_DecRef(sizes);
    if (strides)
        Py_DecRef(strides);
    PyErr_Clear();
    return span;
}

/* Return the address of the first of `span` elements; NULL unless all of them are within `room` bytes from `base`. */
static const void *place_of(long long base, long long start, long long span, long long room, int type) {
    start *= WIDTHS[type];
    if (base <= 0 || start < 0 || start + span * WIDTHS[type] > room || (base + start) % WIDTHS[type])
        return NULL;
    return (const void *)(uintptr_t)(base + start);
}

/* Check adjacent numbers. For many of them other threads may take the GIL meanwhile; their storage is kept alive. */
static int numbers_are(const void *place, long long span, int type) {
    const Host *host = &entry.host;
    if (!place)
        return UNSEEN;
    int64_t since = entry.metered && span > BRIEF ? now() : 0;
    void *thread = span > TOGETHER ? PyEval_SaveThread() : NULL;
    int found = SEEN + host->gate(place, span, type, (int)host->level);
    if (thread)
        PyEval_RestoreThread(thread);
    entry.looked += since ? now() - since : 0;
    return found;
}

static int type_of(const void *impl) { /* an index as in `Host`; 10: another dtype */
    uint16_t dtype = FIELD(uint16_t, impl, entry.layout.dtype);
    int type = 0;
    while (type < 10 && dtype != entry.layout.dtypes[type])
        type++;
    return type;
}

/* Return where the numbers of a plain tensor of one of the first four dtypes lie side by side; NULL: it has to be read
 * through Python. */
static const void *numbers_of(const void *impl, int type) {
    const Layout *layout = &entry.layout;
    const void *storage = FIELD(void *, impl, layout->storage);
    if (!(FIELD(uint8_t, impl, layout->contiguous) & layout->mask) || !storage ||
        FIELD(uint64_t, storage, layout->deleter) != layout->owner)
        return NULL;
    return place_of(FIELD(int64_t, storage, layout->base), FIELD(int64_t, impl, layout->start), FIELD(int64_t, impl, layout->numel),
                    FIELD(int64_t, storage, layout->nbytes), type);
}

/* Check the numbers of a plain tensor of up to `most` elements. UNSEEN: it has to be read through Python. */
static int plain_is(const void *impl, long long most) {
    long long elements = FIELD(int64_t, impl, entry.layout.numel);
    int type = type_of(impl);
    if (type >= 4 || !elements)
        return type < 10 ? SEEN : UNSEEN;
    return elements < 0 || elements > most ? UNSEEN : numbers_are(numbers_of(impl, type), elements, type);
}

/* Check the numbers of a tensor of up to `most` elements if all of them are in host memory, which
 * hookd/target/tensors/host_memory.py `locate` determines in the same way. */
static int tensor_is(PyObject *tensor, long long most) {
    const Host *host = &entry.host;
    const void *impl = plain(tensor);
    int of_plain = impl ? plain_is(impl, most < TOGETHER ? most : TOGETHER) : UNSEEN;
    if (of_plain != UNSEEN || (impl && FIELD(int64_t, impl, entry.layout.numel) > most) || !may_ask())
        return of_plain;
    PyObject *dtype = PyObject_GetAttr(tensor, entry.dtype_name);
    int type = 0, found = UNSEEN;
    while (type < 10 && dtype != host->dtypes[type])
        type++;
    if (dtype)
        Py_DecRef(dtype); /* dtypes are never freed */
    PyErr_Clear();
    if (type >= 4)
        return type < 10 ? SEEN : UNSEEN;
    long long elements = asked(tensor, entry.numel_name);
    if (elements == 0)
        return SEEN;
    if (elements < 0 || elements > most || !is_true(PyObject_GetAttr(tensor, entry.host_name)))
        return UNSEEN;
    long long span = span_of(tensor, elements, elements < BRIEF / 2 ? BRIEF : 2 * elements < most ? 2 * elements : most);
    if (span < 0)
        return UNSEEN;
    PyObject *storage = PyObject_VectorcallMethod(entry.storage_name, &tensor, 1, NULL);
    if (storage) { /* storage that is not resizable is a mapped file, which may be truncated */
        long long base = asked(storage, entry.address_name), room = asked(storage, entry.nbytes_name);
        long long start = asked(tensor, entry.offset_name);
        if (is_true(PyObject_VectorcallMethod(entry.resizable_name, &storage, 1, NULL)))
            found = numbers_are(place_of(base, start, span, room, type), span, type);
        Py_DecRef(storage);
    }
    PyErr_Clear();
    return found;
}

/* Whether a gradient is known to have no infinity, not even -inf, and no NaN. */
int is_finite(PyObject *tensor) {
    const void *impl = plain(tensor);
    long long elements = impl ? FIELD(int64_t, impl, entry.layout.numel) : -1;
    int type = impl ? type_of(impl) : 10;
    if (elements < 0 || elements > BRIEF || type >= 4)
        return 0;
    const void *place = elements ? numbers_of(impl, type) : NULL;
    return !elements || (place && !entry.host.gate(place, elements, type, (int)entry.host.level));
}

/* Let Python look at the output of a call. `before`: see `version_of`. Return -1 if an exception is set. */
static int ask_about(PyObject *state, PyObject *function, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names,
                     PyObject *output, PyObject *before) {
    PyObject *given[7] = {NULL, state, module, NULL, NULL, output, before ? before : &_Py_NoneStruct};
    int64_t begun = entry.metered ? now() : 0;
    PyObject *done = with_packed(state, function, given, 6, 3, args, count, names);
    if (done)
        Py_DecRef(done);
    entry.charged += begun ? now() - begun : 0; /* Python charges this time itself */
    return done ? 0 : -1;
}

/* Check the output of a call: a tensor, None, or a tuple of these. */
static int output_is(PyObject *output, long long most) {
    if (output == &_Py_NoneStruct)
        return SEEN;
    if (TYPE(output) == entry.host.tensor)
        return tensor_is(output, most);
    if (TYPE(output) != &PyTuple_Type || PyTuple_Size(output) > 8)
        return UNSEEN;
    int worst = SEEN;
    for (Py_ssize_t i = 0; i < PyTuple_Size(output) && worst <= MASKED; i++) {
        PyObject *one = PyTuple_GetItem(output, i);
        int found = one == &_Py_NoneStruct ? SEEN : TYPE(one) == entry.host.tensor ? tensor_is(one, most) : UNSEEN;
        worst = found > worst ? found : worst;
    }
    return worst;
}

/* Return the version of a call's input if that is a single tensor; else NULL, with no exception set. */
PyObject *version_of(PyObject *const *args, Py_ssize_t count, PyObject *names) {
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

/* Store in `versions` the versions of all inputs of a call, from Python if `version_of` returns NULL. Return -1 if an
 * exception is set, a signal handler's. */
int versions_of(PyObject *state, PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject **versions) {
    PyObject *given[3] = {NULL};
    *versions = version_of(args, count, names);
    if (!*versions)
        *versions = with_packed(state, entry.host.versions, given, 2, 1, args, count, names);
    return *versions ? 0 : -1;
}

/* Return the version of a large plain tensor; -1 for any other. */
static int64_t version_of_large(PyObject *output) {
    const void *impl = plain(output), *version = impl ? FIELD(void *, impl, entry.layout.version) : NULL;
    return version && FIELD(int64_t, impl, entry.layout.numel) > BRIEF ? (int64_t)FIELD(uint32_t, version, entry.layout.count) : -1;
}

/* Whether a large output is the last tensor that was found finite, in the same version. Containers often return the
 * output of their last module. A change through `data` does not change the version, and is not noticed here. */
static int is_known(PyObject *output, int64_t version) {
    PyObject *known = entry.large ? PyObject_Vectorcall(entry.large, NULL, 0, NULL) : NULL; /* the referent of the weak reference */
    if (!known)
        PyErr_Clear();
    else
        Py_DecRef(known);
    return known == output && entry.large_version == version;
}

/* Note by a weak reference that a large output is finite. A leaf may be a buffer, which must not have a weak
 * reference. */
static void know(PyObject *output, int64_t version) {
    PyObject *is_leaf = may_ask() ? PyObject_GetAttr(output, entry.leaf_name) : NULL;
    PyObject *large = is_leaf == &_Py_FalseStruct ? PyWeakref_NewRef(output, NULL) : NULL, *old = entry.large;
    PyErr_Clear();
    entry.large = large, entry.large_version = version;
    if (is_leaf)
        Py_DecRef(is_leaf);
    if (old)
        Py_DecRef(old);
}

/* Check the output of a call. After something bad, every output counts as bad. `hands`: check large outputs too; an
 * output that is still UNSEEN is handed to Python. */
int looked_at(PyObject *output, int hands) {
    if (entry.alert)
        return BAD;
    int64_t version = hands ? version_of_large(output) : -1;
    if (version >= 0 && is_known(output, version))
        return SEEN;
    int found = output_is(output, hands ? INT64_MAX / 4 : BRIEF);
    if (version >= 0 && found == SEEN)
        know(output, version);
    entry.passed += found == UNSEEN && !hands;
    return found;
}

/* Let Python check an output that could not be checked in C. Return -1 if an exception is set: a signal handler's, or
 * a plugin's for the training. */
int handed(PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject *output, PyObject *before) {
    return ask_about(state, entry.host.hand, module, args, count, names, output, before);
}

enum { COUNT, MEAN, SQUARES, LOW, HIGH, ZERO, NANS, INFS, NEGATIVE_INFS, SUMS = 10 }; /* the order of kernel.c */

/* Compute statistics from the sums, as `Summary.of_sums` of hookd/api/summary.py does. */
static void described(const double *sums, double *into) {
    double finite = sums[COUNT], odd = sums[NANS] + sums[INFS] + sums[NEGATIVE_INFS], nothing = __builtin_nan("");
    double mean = sums[MEAN], squares = sums[SQUARES], low = sums[LOW], high = sums[HIGH];
    if (low == high) /* exactly, although the sums are rounded */
        mean = low, squares = 0.0;
    into[ZEROS_OF] = sums[ZERO] / (finite + odd), into[NONFINITE_OF] = odd, into[NORM_OF] = 0.0;
    into[MEAN_OF] = into[STD_OF] = into[MIN_OF] = into[MAX_OF] = into[ABSMAX_OF] = nothing;
    if (finite > 0.0) {
        into[MEAN_OF] = mean, into[STD_OF] = __builtin_sqrt(squares / finite), into[MIN_OF] = low, into[MAX_OF] = high;
        into[ABSMAX_OF] = __builtin_fabs(-low > high ? -low : high), into[NORM_OF] = __builtin_sqrt(squares + finite * mean * mean);
    }
}

/* Whether a plugin shows statistics of this output; set HAS_LOOKED for each one that does. */
static int is_shown(const Count *counted) {
    int is_any = 0;
    for (size_t i = 0; i < counted->shows; i++)
        if (counted->shown[i].standing[IS_ON] != 0.0)
            counted->shown[i].standing[HAS_LOOKED] = 1.0, is_any = 1;
    return is_any;
}

typedef struct { /* the numbers of a plain tensor while they are read */
    const void *place;
    int64_t elements;
    int type;
    PyObject *storage; /* kept alive for a large tensor, while other threads may take the GIL; else NULL */
    void *thread;
} Reading;

/* Begin to read a plain tensor. Return 0 if it has to be read through Python. */
static int reading_begins(Reading *reading, PyObject *tensor, const void *impl) {
    reading->elements = FIELD(int64_t, impl, entry.layout.numel), reading->type = type_of(impl);
    int is_apart = reading->elements > TOGETHER;
    if (reading->type >= 4 || reading->elements <= 0 || (is_apart && !may_ask()))
        return 0;
    reading->storage = is_apart ? PyObject_VectorcallMethod(entry.storage_name, &tensor, 1, NULL) : NULL;
    reading->place = is_apart && !reading->storage ? NULL : numbers_of(impl, reading->type);
    if (!reading->place && reading->storage)
        Py_DecRef(reading->storage);
    PyErr_Clear();
    reading->thread = reading->place && reading->storage ? PyEval_SaveThread() : NULL;
    return reading->place != NULL;
}

static void reading_ends(const Reading *reading) {
    if (reading->thread)
        PyEval_RestoreThread(reading->thread);
    if (reading->storage)
        Py_DecRef(reading->storage);
}

/* Sum up an output that can be read in place. Return 0 if it cannot. */
static int summed(PyObject *output, double *sums) {
    const Host *host = &entry.host;
    const void *impl = plain(output);
    Reading reading;
    if (!impl || type_of(impl) == 2 || !reading_begins(&reading, output, impl))
        return 0;
    host->summary(reading.place, reading.elements, reading.type, (int)host->level, sums);
    reading_ends(&reading);
    return 1;
}

/* Set gauges to statistics of an output. Return -1 if an exception is set, a signal handler's. Python is called if the
 * output is not a plain tensor; if it is float16, because plugins are always called for that; if it has so many zeros
 * that a plugin is called; and if the module has no series yet. */
int show_output(Count *counted, PyObject *state, PyObject *module, PyObject *output) {
    const Host *host = &entry.host;
    if (!is_shown(counted) || output == &_Py_NoneStruct)
        return 0;
    int64_t since = entry.metered ? now() : 0;
    const void *impl = plain(output);
    double sums[SUMS], found[STATISTICS];
    uint64_t freed = entry.freed;
    int type = impl ? type_of(impl) : 10, asks = 0, is_summed = summed(output, sums);
    if (entry.freed != freed) /* freed by another thread in the meantime: `counted` may be gone */
        return 0;
    if (is_summed)
        described(sums, found);
    for (size_t i = 0; i < counted->shows; i++) {
        const Shown *shown = &counted->shown[i];
        if (shown->standing[IS_ON] == 0.0)
            continue;
        if (!is_summed || found[ZEROS_OF] >= shown->standing[ZEROS] || shown->module[STATE] != 0.0) {
            asks = 1;
            continue;
        }
        for (size_t j = 0; j < STATISTICS; j++)
            if (shown->module[j] >= 0.0)
                host->cells[(size_t)shown->module[j]] = found[j];
    }
    entry.shown += since ? now() - since : 0; /* a metered step may have begun in the meantime, in another thread */
    if (!asks || (type >= 4 && type < 10)) /* integers have no statistics */
        return 0;
    since = entry.metered ? now() : 0;
    PyObject *given[3] = {NULL, module, output}, *done = asking(state, host->shown, given + 1, 2);
    entry.charged += since ? now() - since : 0;
    if (done)
        Py_DecRef(done);
    return done ? 0 : -1;
}

/* Let Python look at a call whose output is bad, or at any call after something bad. `before`: see `version_of`.
 * Return -1 if an exception is set: a signal handler's, or a plugin's for the training. */
int suspected(PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names, PyObject *output,
                   PyObject *before) {
    return ask_about(state, entry.host.suspect, module, args, count, names, output, before);
}

/* Store what is read of a plain tensor: its version, its number of elements, and the result of `plain_is`. Return -1
 * if it is not plain, and would be read through Python. */
EXPORTED int hookd_entry_read(PyObject *tensor, int64_t *into) {
    const void *impl = plain(tensor), *version = impl ? FIELD(void *, impl, entry.layout.version) : NULL;
    if (!version)
        return -1;
    into[0] = FIELD(uint32_t, version, entry.layout.count);
    into[1] = FIELD(int64_t, impl, entry.layout.numel);
    into[2] = plain_is(impl, BRIEF);
    return 0;
}

typedef struct { /* plain tensors of one dtype, to be examined together */
    const void **places;
    int64_t *counts, elements;
    Py_ssize_t size, before; /* numbers of tensors gathered, and of those examined before */
    int type;
    double largest; /* magnitude in the examined tensors; NaN if there is one */
} Numbers;

static int begun(Numbers *numbers, Py_ssize_t most) {
    *numbers = (Numbers){PyMem_RawCalloc(most > 0 ? (size_t)most : 1, sizeof *numbers->places + sizeof *numbers->counts)};
    numbers->counts = (int64_t *)(numbers->places + (most > 0 ? most : 1));
    return numbers->places != NULL && entry.host.largest;
}

/* Add a tensor if it has the same dtype as the previous ones, and can be read; else return 0. */
static int added(Numbers *numbers, const void *impl) {
    int type = type_of(impl);
    int64_t count = FIELD(int64_t, impl, entry.layout.numel);
    const void *place = type < 4 && count > 0 && (!(numbers->size + numbers->before) || type == numbers->type) ? numbers_of(impl, type) : NULL;
    if (!place)
        return 0;
    numbers->places[numbers->size] = place, numbers->counts[numbers->size++] = count;
    numbers->type = type, numbers->elements += count;
    return 1;
}

/* Examine the gathered tensors. `is_apart`: the storage is kept alive, and other threads may take the GIL meanwhile. */
static void look(Numbers *numbers, int is_apart) {
    const Host *host = &entry.host;
    void *thread = is_apart ? PyEval_SaveThread() : NULL;
    double found = numbers->size ? host->largest(numbers->places, numbers->counts, (int)numbers->size, numbers->type, (int)host->level) : 0.0;
    if (thread)
        PyEval_RestoreThread(thread);
    if (!(found <= numbers->largest)) /* true for NaN as well, which stays once it is there */
        numbers->largest = numbers->largest == numbers->largest ? found : numbers->largest;
    numbers->before += numbers->size, numbers->size = 0, numbers->elements = 0;
}

/* Examine a single large tensor while its storage is kept alive. Return 0 if the storage is not available. */
static int look_apart(Numbers *numbers, PyObject *one, int of_gradients) {
    if (!may_ask())
        return 0;
    PyObject *tensor = of_gradients ? PyObject_GetAttr(one, entry.grad_name) : one;
    PyObject *storage = tensor ? PyObject_VectorcallMethod(entry.storage_name, &tensor, 1, NULL) : NULL;
    if (tensor && of_gradients)
        Py_DecRef(tensor);
    if (!storage)
        return 0;
    look(numbers, 1);
    Py_DecRef(storage);
    return 1;
}

/* Return torch's data of a tensor or a parameter; NULL: it has to be read through Python. */
static const void *impl_of(PyObject *tensor) {
    const PyObject *type = TYPE(tensor);
    return entry.layout.impl && (type == entry.host.tensor || type == entry.host.parameter) ? FIELD(void *, tensor, entry.layout.impl) : NULL;
}

/* Return the gradient of a parameter; `nothing` if it has none. NULL: it has to be read through Python. */
static const void *gradient_of(PyObject *parameter) {
    const Layout *layout = &entry.layout;
    const void *impl = impl_of(parameter);
    const void *meta = impl ? FIELD(void *, impl, layout->autograd) : NULL;
    return !impl ? NULL : meta ? FIELD(void *, meta, layout->grad) : (const void *)layout->nothing;
}

/* `largest(list, of_gradients, most)`: examine all tensors of a list, or the gradients of all parameters in it, of those
 * with at most `most` elements. Return the largest magnitude in them, NaN if there is one, and 0 if there are none;
 * None: they are not all plain and of one dtype, and have to be read through Python. */
PyObject *largest_of(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    PyObject *list = args[0];
    int of_gradients = count == 3 && args[1] == &_Py_TrueStruct;
    long long most = count == 3 ? PyLong_AsLongLong(args[2]) : 0;
    (void)self;
    Py_ssize_t size = count == 3 ? PyList_Size(list) : -1;
    Numbers numbers = {0};
    int is_right = size >= 0 && begun(&numbers, size);
    for (Py_ssize_t i = 0; is_right && i < size && i < PyList_Size(list); i++) { /* another thread may shorten the list */
        PyObject *one = PyList_GetItem(list, i);
        const void *impl = of_gradients ? gradient_of(one) : plain(one);
        if (of_gradients && impl == (const void *)entry.layout.nothing)
            continue;
        int64_t elements = impl ? FIELD(int64_t, impl, entry.layout.numel) : 0;
        if (elements > most)
            continue;
        if (numbers.elements && numbers.elements + elements > TOGETHER) {
            look(&numbers, 0);
            PyEval_RestoreThread(PyEval_SaveThread()); /* for threads that wait for the GIL */
            is_right = entry.counts;
            i--; /* it may have another gradient by now */
            continue;
        }
        is_right = impl && FIELD(uint64_t, impl, entry.layout.keys) == entry.layout.plain && added(&numbers, impl) &&
                   (elements <= TOGETHER || look_apart(&numbers, one, of_gradients));
    }
    PyErr_Clear();
    if (is_right)
        look(&numbers, 0);
    PyMem_RawFree(numbers.places);
    if (is_right)
        return PyFloat_FromDouble(numbers.largest);
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}

static double half_of(uint16_t bits) { /* IEEE 754 binary16; a subnormal number has no hidden bit */
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    union { uint64_t bits; double number; } whole = {(uint64_t)(exponent == 31 ? 2047 : exponent + 1008) << 52 | (uint64_t)fraction << 42};
    double number = exponent ? whole.number : fraction / 16777216.0;
    return bits >> 15 ? -number : number;
}

/* `number(tensor)`: return the only element of a plain tensor; None: it has to be read through Python. */
PyObject *only_number(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    const void *impl = count == 1 ? plain(args[0]) : NULL;
    int type = impl && FIELD(int64_t, impl, entry.layout.numel) == 1 ? type_of(impl) : 10;
    const void *place = type < 4 ? numbers_of(impl, type) : NULL;
    (void)self;
    if (!place) {
        Py_IncRef(&_Py_NoneStruct);
        return &_Py_NoneStruct;
    }
    union { uint32_t bits; float number; } wide = {type == 3 ? (uint32_t)FIELD(uint16_t, place, 0) << 16 : 0};
    return PyFloat_FromDouble(type == 0   ? (double)FIELD(float, place, 0)
                              : type == 1 ? FIELD(double, place, 0)
                              : type == 2 ? half_of(FIELD(uint16_t, place, 0))
                                          : (double)wide.number);
}

/* `digest(tensor)`: return the digest of a plain tensor or parameter, and the sums of `Extent.of_sums`, in one tuple; None:
 * it has to be read through Python. */
PyObject *digest_of(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    enum { ENDS = 5 };
    const Host *host = &entry.host;
    const void *impl = count == 1 ? impl_of(args[0]) : NULL;
    Reading reading;
    double sums[ENDS];
    (void)self;
    if (!impl || FIELD(uint64_t, impl, entry.layout.keys) != entry.layout.plain || !reading_begins(&reading, args[0], impl)) {
        Py_IncRef(&_Py_NoneStruct);
        return &_Py_NoneStruct;
    }
    uint64_t digest = host->digest(reading.place, reading.elements, reading.type, (int)host->level, sums);
    reading_ends(&reading);
    PyObject *found = PyTuple_New(1 + ENDS);
    if (found)
        PyTuple_SetItem(found, 0, PyLong_FromUnsignedLongLong(digest));
    for (Py_ssize_t i = 0; found && i < ENDS; i++)
        PyTuple_SetItem(found, 1 + i, PyFloat_FromDouble(sums[i]));
    return found;
}

/* Replace kept outputs by weak references; return the number of those that could not be replaced. */
static int weakened(PyObject *returned) {
    int left = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(returned); i++) {
        PyObject *one = PyList_GetItem(returned, i), *weak;
        if (TYPE(one) == &PyTuple_Type && PyTuple_Size(one) == 3)
            continue; /* it is weak already */
        if (!(weak = weakly(one)))
            left++;
        else
            PyList_SetItem(returned, i, weak);
    }
    return left;
}

/* `let_go(state, last)`: stop keeping alive the outputs that a thread remembers, and remember only the last `last`
 * calls. Return the number of those that are left to Python. Objects freed by this may run any code. */
PyObject *let_go(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (!entry.counts || count != 2)
        return PyLong_FromLongLong(1);
    PyObject *state = args[0];
    Py_ssize_t last = (Py_ssize_t)PyLong_AsLongLong(args[1]);
    PyObject *returned = *at(state, entry.host.returned), *ring = *at(state, entry.host.latest);
    Py_IncRef(returned), Py_IncRef(ring);
    Py_ssize_t size = PyList_Size(returned);
    if (size > last)
        PyList_SetSlice(returned, 0, size - last, NULL);
    unrolled(state, returned, ring);
    int left = gives(entry.host.modes, entry.zero) ? weakened(returned) : (int)PyList_Size(returned); /* a mode would see the access to them */
    Py_DecRef(returned), Py_DecRef(ring);
    return PyLong_FromLongLong(left);
}
