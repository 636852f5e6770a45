#!/bin/bash
# chain.sh NAME NUMBER: a chain of so many processes that look like fork servers of Python, each of which waits for the next.
if [ "$2" -gt 0 ]; then
    (exec -a python3 bash "$0" "$1" "$(($2 - 1))")
else
    echo ready
    read -r _
fi
