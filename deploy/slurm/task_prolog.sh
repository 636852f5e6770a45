#!/bin/sh
# TaskProlog= of slurm.conf, run as the job's user before each task: what it prints as `export` becomes the task's
# environment. The daemon attaches to processes with HOOKD=1. A user's own choice wins: `HOOKD=0 sbatch …`.
echo "export HOOKD=${HOOKD:-1}"
