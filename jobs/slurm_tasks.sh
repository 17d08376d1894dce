#!/bin/bash
#SBATCH --job-name=fluxbatch
#SBATCH --ntasks=4
#SBATCH --gpus-per-task=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180
# sbatch jobs/slurm_tasks.sh job=nightly ...: one job of four ranks, one GPU each, which start and end together.
PYTHON=python
FOLDER=$PWD
SETTINGS=("$@")

cd "$FOLDER" || exit 1
again=0
trap 'again=1; kill -USR1 "$child" 2>/dev/null' USR1     # time is nearly up: srun passes it on, all ranks drain
trap ':' TERM                                            # scancel or preemption: Slurm tells the ranks itself
# srun would kill its tasks at once when it gets TERM; one rank that fails must not end the others.
(trap '' TERM; exec srun --kill-on-bad-exit=0 --label "$PYTHON" -m fluxbatch "${SETTINGS[@]}") & child=$!
rc=0; wait "$child" || rc=$?
while kill -0 "$child" 2>/dev/null; do rc=0; wait "$child" || rc=$?; done   # a trap interrupts wait
# 75: drained. 138: the signal met Python before it could hear it.
case $again$rc in 175|1138) scontrol requeue "$SLURM_JOB_ID"; sleep 60;; esac
exit "$rc"
