#!/bin/sh
# To a job that runs already and that nobody watches, on each of its nodes:  deploy/slurm/attach.sh JOBID [hookd's options]
# Ctrl-C detaches on all of them.
[ $# -ge 1 ] || { echo "usage: $0 JOBID [options of hookd attach]" >&2; exit 2; }
job=$1
shift
# The step of this command is told from the training by what it runs; --match finds the ranks that torchrun has started.
exec srun --jobid "$job" --overlap --ntasks-per-node=1 -- hookd attach --match 'train.py' --listen 0.0.0.0:9465 "$@"
