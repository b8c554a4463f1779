#!/bin/bash
# One launcher on each node, which starts a rank for each GPU and restarts them:  sbatch examples/clusters/slurm.sh train.py
#SBATCH --job-name=train
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8
#SBATCH --requeue
set -euo pipefail
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
secret=${SHARDWELL_SECRET_FILE:-$HOME/.shardwell-secret}
[[ -e $secret ]] || (umask 077 && openssl rand -hex 32 >"$secret")
export SHARDWELL_SECRET_FILE=$secret
srun shardwell run -n "${SLURM_GPUS_ON_NODE:-1}" --nnodes "$SLURM_NNODES" --master-addr "$first" \
    --master-port $((10000 + SLURM_JOB_ID % 20000)) --max-restarts 3 "$@"
