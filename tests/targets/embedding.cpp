// A program that has Python in it, as simulators and servers do: it trains with the script that TRAINS names.

#include <Python.h>

#include <cstdlib>

const char *const RUN =
    "import os, runpy, sys\n"
    "sys.argv = os.environ['TRAINS'].split()\n"
    "sys.path.insert(0, os.path.dirname(sys.argv[0]))\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')\n";

int main(int argc, char **argv) {
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    config.parse_argv = 0;
    PyConfig_SetBytesArgv(&config, argc, argv);
    PyConfig_SetBytesString(&config, &config.executable, std::getenv("EXECUTABLE"));
    if (PyStatus_Exception(Py_InitializeFromConfig(&config))) return 1;
    PyConfig_Clear(&config);
    const int failed = PyRun_SimpleString(RUN);
    return Py_FinalizeEx() || failed;
}
