/* Calls to Python from the entry, hidden from a profiler of the training; and the state of the calling thread. */
#include "entry.h"

/* Run the module as if hookd were not there. Torch's `_wrapped_call_impl` only chooses between two functions
 * (torch/nn/modules/module.py, 2.1 to 2.15); choosing here saves packing the arguments once more. If a profiler
 * listens, it is called all the same: `torch.profiler` recognizes a module's call by its code. */
PyObject *through(PyObject *state, PyObject *const *args, size_t nargsf, PyObject *names) {
    if (state && *at(state, entry.host.profiled) == &_Py_TrueStruct)
        return PyObject_Vectorcall(entry.host.whole, args, nargsf, names);
    PyObject *chosen = PyObject_GetAttr(args[0], entry.compiled), *result;
    if (chosen == &_Py_NoneStruct) {
        Py_DecRef(chosen);
        chosen = PyObject_GetAttr(args[0], entry.impl); /* a class, or another tool, may have its own */
    }
    if (!chosen)
        return NULL;
    if (TYPE(chosen) == &PyMethod_Type && PyMethod_Self(chosen) == args[0])
        result = PyObject_Vectorcall(PyMethod_Function(chosen), args, nargsf, names);
    else
        result = PyObject_Vectorcall(chosen, args + 1, (nargsf & ~OFFSET) - 1, names);
    Py_DecRef(chosen);
    return result;
}

PyObject *packed(PyObject *const *args, Py_ssize_t count) {
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++) {
        Py_IncRef(args[i]);
        PyTuple_SetItem(tuple, i, args[i]);
    }
    return tuple;
}

PyObject *named(PyObject *const *values, PyObject *names) {
    PyObject *dict = PyDict_New();
    Py_ssize_t count = dict && names ? PyTuple_Size(names) : 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyDict_SetItem(dict, PyTuple_GetItem(names, i), values[i]) < 0) {
            Py_DecRef(dict);
            return NULL;
        }
    return dict;
}

void set_to(PyObject **place, PyObject *value) { /* steals the value; NULL: no memory */
    PyObject *old = *place;
    if (!value) {
        PyErr_Clear();
        return;
    }
    *place = value;
    Py_DecRef(old);
}

int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Return the state of the calling thread, borrowed; NULL if there is none. This may run any code, once per thread. */
PyObject *here(void) {
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

/* Whether `function` returns this very object. The call needs no Python frame. */
int gives(PyObject *function, PyObject *expected) {
    PyObject *answer = PyObject_Vectorcall(function, NULL, 0, NULL);
    if (!answer)
        PyErr_Clear();
    else
        Py_DecRef(answer); /* the address stays valid: small ints and None are never freed */
    return answer == expected;
}

int is_profiled(void) {
    const Host *host = &entry.host;
    return host->profile && !(gives(host->profile, &_Py_NoneStruct) && (!host->tool || host->tool == host->profile || gives(host->tool, &_Py_NoneStruct)));
}

void suspend(PyObject *state) {
    Py_IncRef(&_Py_TrueStruct);
    set_to(at(state, entry.host.hidden), &_Py_TrueStruct);
    PyThreadState_EnterTracing(PyThreadState_Get());
}

/* Hide from a profiler of the training what hookd does from now on, as the interpreter hides what a profiler itself
 * calls: hookd/target/entry/hidden.py. Return whether this call has hidden it, for `show`. */
int hide(PyObject *state) {
    if (!state || !PyThreadState_EnterTracing || *at(state, entry.host.hidden) != &_Py_FalseStruct || !is_profiled())
        return 0;
    Py_IncRef(state); /* a detach may release it in the meantime */
    suspend(state);
    return 1;
}

void show(PyObject *state, int was_seen) {
    if (!was_seen)
        return;
    PyThreadState_LeaveTracing(PyThreadState_Get());
    Py_IncRef(&_Py_FalseStruct);
    set_to(at(state, entry.host.hidden), &_Py_FalseStruct);
    Py_DecRef(state);
}

/* Call a Python function of hookd's, hidden from a profiler. */
PyObject *asking(PyObject *state, PyObject *function, PyObject *const *given, size_t count) {
    Py_IncRef(function); /* it may be replaced in the meantime */
    int was_seen = hide(state);
    PyObject *result = PyObject_Vectorcall(function, given, count | OFFSET, NULL);
    show(state, was_seen);
    Py_DecRef(function);
    return result;
}

/* Call `function` with the `size` values from `given[1]` on; `given[0]` stays free. The arguments of a module's call
 * are packed and put into `given[place]` and `given[place + 1]`. */
PyObject *with_packed(PyObject *state, PyObject *function, PyObject **given, size_t size, size_t place,
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

PyObject *planned(PyObject *state, PyObject *plan, PyObject *const *args, Py_ssize_t count, PyObject *names) {
    PyObject *given[4] = {NULL, args[0]};
    return with_packed(state, plan, given, 3, 2, args, count, names);
}

/* Let Python clean up after a call that an exception has left; the exception then propagates. */
void left(PyObject *state, PyObject *outer, PyObject *module) {
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
    PyObject *kind, *other, *where; /* for example a signal handler's exception: it replaces the first one */
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

typedef struct { /* PyMethodDef */
    const char *name;
    Method call;
    int flags;
    const char *doc;
} Definition;

/* Return a function for Python; a seldom-called one costs a tenth of what it costs through ctypes. Its definition is
 * never freed: the function reads it while being freed, and this library may be unloaded by then. */
PyObject *method(const char *name, Method call) {
    enum { LONGEST = 32 };
    struct { Definition definition; char name[LONGEST]; } *made = PyMem_RawCalloc(1, sizeof *made);
    if (!made)
        return PyErr_NoMemory();
    for (size_t i = 0; i < LONGEST - 1 && name[i]; i++)
        made->name[i] = name[i];
    made->definition = (Definition){made->name, call, 0x0080, NULL}; /* METH_FASTCALL */
    return PyCFunction_NewEx(&made->definition, NULL, NULL);
}

/* Call a function of hookd's, hidden from a profiler: see hookd/target/entry/hidden.py. */
EXPORTED PyObject *hookd_entry_hidden(PyObject *function, PyObject *args, PyObject *kwargs) {
    PyObject *state = here();
    entry.inside++;
    int was_seen = hide(state);
    PyObject *result = PyObject_Call(function, args, kwargs);
    show(state, was_seen);
    entry.inside--;
    return result;
}

/* Call a function of the training from inside such a function, visible to the profiler. */
EXPORTED PyObject *hookd_entry_call_visibly(PyObject *function, PyObject *args, PyObject *kwargs) {
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
