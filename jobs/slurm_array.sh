#!/bin/bash
#SBATCH --job-name=fluxbatch
#SBATCH --array=0-3
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180
# sbatch jobs/slurm_array.sh job=nightly ...: four ranks, one GPU each. Change WORLD_SIZE with --array.
WORLD_SIZE=4
PYTHON=python
FOLDER=$PWD
SETTINGS=("$@")

cd "$FOLDER" || exit 1
again=0
trap 'again=1; kill -TERM "$child" 2>/dev/null' USR1     # time is nearly up: drain, then requeue
trap 'kill -TERM "$child" 2>/dev/null' TERM              # scancel or preemption: drain, do not requeue
"$PYTHON" -m fluxbatch "${SETTINGS[@]}" run.rank="$SLURM_ARRAY_TASK_ID" run.world_size="$WORLD_SIZE" & child=$!
rc=0; wait "$child" || rc=$?
while kill -0 "$child" 2>/dev/null; do rc=0; wait "$child" || rc=$?; done   # a trap interrupts wait
# 75: drained. 143: the signal met Python before it could hear it.
case $again$rc in 175|1143) scontrol requeue "$SLURM_JOB_ID"; sleep 60;; esac
exit "$rc"
