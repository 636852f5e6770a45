#!/bin/sh
# To a job that runs already and that nobody watches, on each of its nodes:  deploy/slurm/attach.sh JOBID [hookd's options]
# Ctrl-C ends it; what is not detached by then leaves by itself within a minute.
PROGRAM=${HOOKD_PROGRAM:-/opt/hookd/bin/hookd}
[ $# -ge 1 ] || { echo "usage: $0 JOBID [options of hookd attach]" >&2; exit 2; }
job=$1
shift
# --match finds the ranks by the name of their script, whoever has started them.
exec srun --quit-on-interrupt --jobid "$job" --overlap --ntasks-per-node=1 -- "$PROGRAM" attach --match 'train.py' --listen 0.0.0.0:9465 "$@"
