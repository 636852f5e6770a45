#!/bin/sh
# Prolog= of slurm.conf, run by slurmd as root on each node before a job: see that the node's daemon serves.
# A prolog that fails takes its node out of service, so this one never does; it says what is wrong in the log.
PROGRAM=${HOOKD_PROGRAM:-/opt/hookd/bin/hookd}
SOCKET=${HOOKD_CONTROL:-/run/hookd/control.sock}

say() { logger --tag hookd-prolog -- "job ${SLURM_JOB_ID:-?}: $*" 2>/dev/null || echo "hookd-prolog: $*" >&2; }

answers() { timeout 10 "$PROGRAM" status --host "unix://$SOCKET" --json >/dev/null 2>&1; }

if ! answers; then
    say "no daemon answers on $SOCKET; starting hookd.service"
    timeout 30 systemctl start hookd.service 2>/dev/null || say "hookd.service did not start: this job is not watched"
fi
exit 0
