#!/bin/bash
# Machines that ssh reaches, without a scheduler: examples/clusters/ssh.sh "node1 node2" train.py
# The first one hosts. Each has gradsync and the script at the same path; RANKS_PER_NODE and PORT may be set.
set -euo pipefail

read -r -a hosts <<< "$1"
shift
ranks=${RANKS_PER_NODE:-4} port=${PORT:-29400} ssh=${SSH:-ssh}
secret=$(python3 -c 'import secrets; print(secrets.token_hex(32))')

# The secret goes by standard input: a command line can be read by everybody on the machine.
remote='f=$(mktemp) && cat > "$f" && cd "$1" && shift && GRADSYNC_SECRET_FILE=$f "$@" < /dev/null; c=$?; rm -f "$f"; exit $c'
pids=()
for number in "${!hosts[@]}"; do
    command=(gradsync run -n "$ranks" --nnodes "${#hosts[@]}" --node-rank "$number" --rendezvous "${hosts[0]}:$port" "$@")
    $ssh "${hosts[$number]}" "$(printf '%q ' bash -c "$remote" gradsync "$PWD" "${command[@]}")" <<< "$secret" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "$code"
