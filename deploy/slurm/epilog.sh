#!/bin/sh
# Epilog= of slurm.conf, run by slurmd as root on each node after a job. Agents go with their processes, so nothing has to be
# detached; but trainings that were killed while no daemon served leave the files of their sockets. Those of the job's
# user on which nobody listens are removed. An epilog that fails takes its node out of service: this one never does.
[ -n "${SLURM_JOB_UID:-}" ] || exit 0
PYTHON=${HOOKD_PYTHON:-/opt/hookd/bin/python}
DIRECTORIES=${HOOKD_SOCKET_DIRECTORIES:-/dev/shm /run /run/user/$SLURM_JOB_UID /tmp /var/tmp}
REMOVE='
import sys
from hookd.tool.attach.control import remove_dead
for path in sys.argv[2:]:
    remove_dead(path, int(sys.argv[1]))
'

for directory in $DIRECTORIES; do
    [ -d "$directory" ] || continue
    find "$directory" -xdev -maxdepth 1 -type s -user "$SLURM_JOB_UID" -name 'hookd-[0-9]*-*.sock' -print0 2>/dev/null
done | timeout 30 xargs -0 -r "$PYTHON" -c "$REMOVE" "$SLURM_JOB_UID" 2>/dev/null
exit 0
