/* Calls Python listeners for the calls that are counted in C; they change nothing. */
#include "entry.h"

enum { MODULE_AT, INPUTS_AT, KWARGS_AT, RECOMPUTE_AT, VERSIONS_AT, OUTPUT_AT, ELAPSED_AT, SELF_AT, IS_NESTED_AT, INFERENCE_AT, VALUES }; /* hookd/target/plugins/values.py */

static void fill(PyObject *values, Py_ssize_t place, PyObject *value) {
    if (!value)
        PyErr_Clear(), Py_IncRef(value = &_Py_NoneStruct); /* no memory */
    PyList_SetItem(values, place, value);
}

static PyObject *ours(PyObject *object) {
    Py_IncRef(object);
    return object;
}

/* Return the values of a call that begins; NULL: an exception is set. */
static PyObject *values_of(PyObject *state, const Listening *to, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names) {
    int wants = to->wants, gives_inputs = (wants & (WANTS_INPUTS | WANTS_VERSIONS)) != 0;
    PyObject *inputs = gives_inputs ? packed(args + 1, count - 1) : ours(&_Py_NoneStruct);
    PyObject *kwargs = gives_inputs && inputs ? named(args + count, names) : ours(&_Py_NoneStruct);
    PyObject *given[] = {NULL, inputs, kwargs}, *versions = ours(&_Py_NoneStruct);
    if (inputs && kwargs && wants & WANTS_VERSIONS) {
        Py_DecRef(versions);
        versions = asking(state, entry.host.versions, given + 1, 2);
    }
    PyObject *values = inputs && kwargs && versions ? PyList_New(VALUES) : NULL;
    PyObject *known[] = {module, inputs, kwargs, &_Py_FalseStruct, versions, &_Py_NoneStruct, entry.zero, entry.zero, &_Py_FalseStruct, *at(state, entry.host.infers)};
    for (Py_ssize_t i = 0; values && i < VALUES; i++)
        PyList_SetItem(values, i, ours(known[i]));
    PyObject *made[] = {inputs, kwargs, versions};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        if (made[i])
            Py_DecRef(made[i]);
    return values;
}

/* Call listeners that look at no tensors, as `Notifier.notify` does for all, at half the cost. Return -1 if an exception
 * is set. */
static int notify_plainly(PyObject *state, PyObject *listeners, PyObject *values) {
    PyObject *no_frame = ours(entry.host.no_frame), *nothing = &_Py_NoneStruct, *given[] = {NULL, listeners, values};
    PyObject *frame = PyObject_Vectorcall(no_frame, &nothing, 1, NULL);
    set_to(at(state, entry.host.busy), ours(&_Py_TrueStruct));
    PyObject *done = frame ? asking(state, entry.host.notify_plainly, given + 1, 2) : NULL;
    set_to(at(state, entry.host.busy), ours(&_Py_FalseStruct));
    PyObject *type = NULL, *error = NULL, *trace = NULL;
    if (!done)
        PyErr_Fetch(&type, &error, &trace);
    PyObject *made[] = {frame ? PyObject_Vectorcall(no_frame, &frame, 1, NULL) : NULL, frame, no_frame, done};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        if (made[i])
            Py_DecRef(made[i]);
    if (!done)
        PyErr_Restore(type, error, trace);
    return done ? 0 : -1;
}

/* Call listeners. Return -1 if an exception is set. */
static int notify(PyObject *state, PyObject *listeners, PyObject *values, int wants) {
    if (!entry.metered && !(wants & WANTS_QUIET))
        return notify_plainly(state, listeners, values);
    int64_t begun = entry.metered ? now() : 0;
    PyObject *given[] = {NULL, state, listeners, values, entry.metered ? &_Py_TrueStruct : &_Py_FalseStruct};
    PyObject *done = asking(state, entry.host.notify, given + 1, 4);
    if (done)
        Py_DecRef(done);
    entry.charged += begun ? now() - begun : 0; /* Python charges this time itself */
    return done ? 0 : -1;
}

/* Call the listeners to a call that begins. Return -1 if an exception is set. */
int notify_before(Notice *notice, size_t group, PyObject *state, PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names) {
    const Listening *to = &entry.listening[group];
    if (!to->before)
        return 0;
    PyObject *before = notice->before = ours(to->before);
    notice->after = ours(to->after), notice->wants = to->wants;
    notice->values = values_of(state, to, module, args, count, names);
    return !notice->values || (PyList_Size(before) && notify(state, before, notice->values, notice->wants)) ? -1 : 0;
}

/* Call the listeners to a call that has returned. Return -1 if an exception is set. */
int notify_after(const Notice *notice, PyObject *state, PyObject *output, int64_t elapsed, int64_t self, int is_nested) {
    if (!notice->values || !PyList_Size(notice->after))
        return 0;
    fill(notice->values, OUTPUT_AT, ours(output));
    fill(notice->values, IS_NESTED_AT, ours(is_nested ? &_Py_TrueStruct : &_Py_FalseStruct));
    if (notice->wants & WANTS_TIMES)
        fill(notice->values, ELAPSED_AT, PyLong_FromLongLong(elapsed)), fill(notice->values, SELF_AT, PyLong_FromLongLong(self));
    return notify(state, notice->after, notice->values, notice->wants);
}

void forget_notice(const Notice *notice) {
    PyObject *held[] = {notice->before, notice->after, notice->values};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++)
        if (held[i])
            Py_DecRef(held[i]);
}

/* Set the listeners to the calls of a group that are counted in C. `host.notify` calls those of the list `before` when a
 * call begins, and those of `after` when it has returned. `before` is None if there are none of either kind. */
EXPORTED int hookd_entry_listen_calls(size_t group, PyObject *before, PyObject *after, int wants) {
    if (group >= GROUPS)
        return 0;
    Listening old = entry.listening[group], none = {0};
    entry.listening[group] = before == &_Py_NoneStruct ? none : (Listening){ours(before), ours(after), wants};
    if (old.before)
        Py_DecRef(old.before), Py_DecRef(old.after);
    return 0;
}
