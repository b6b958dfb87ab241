#!/usr/bin/env bash
# An agent in bash, with nothing else: it asks the model over HTTP, looks up what the model wants to know, and says in
# its last line what that earned. It knows the address and the key from its environment, like any client of OpenAI's.
set -euo pipefail
export LC_ALL=C
task=$(cat)  # {"question": "How many figs are there?", "answer": "4", "shelves": {"figs": "C", …}, "numbers": {"C": "4", …}}
address=${OPENAI_BASE_URL#http://}
path=/${address#*/} address=${address%%/*}
tools='[{"type":"function","function":{"name":"find","description":"The shelf on which a kind of thing lies.",
  "parameters":{"type":"object","properties":{"kind":{"type":"string"}},"required":["kind"]}}},
 {"type":"function","function":{"name":"count","description":"How many things lie on a shelf.",
  "parameters":{"type":"object","properties":{"shelf":{"type":"string"}},"required":["shelf"]}}}]'

# What stands under a name in the task.
known() {
    if [[ $task =~ \"$1\":\ *\"([^\"]*)\" ]]; then echo "${BASH_REMATCH[1]}"; else echo '?'; fi
}

# The model's answer to the messages so far.
ask() {
    local body="{\"model\":\"$ETUDE_MODEL\",\"messages\":[$messages],\"tools\":$tools}"
    exec 3<>"/dev/tcp/${address%:*}/${address##*:}"
    printf '%s\r\n' "POST $path/chat/completions HTTP/1.1" "Host: $address" "Authorization: Bearer $OPENAI_API_KEY" \
        "Content-Type: application/json" "Content-Length: ${#body}" "Connection: close" "" >&3
    printf '%s' "$body" >&3
    cat <&3
}

messages="{\"role\":\"user\",\"content\":\"$(known question)\"}"
reward=0
for _ in 1 2 3 4; do
    told=$(ask)
    if ! [[ $told =~ \"message\":(\{.*\}),\"logprobs\" ]]; then
        echo "$told" >&2
        exit 1
    fi
    said=${BASH_REMATCH[1]}
    messages+=",$said"
    # A call looks like this: {"id":"call_1","type":"function","function":{"name":"find","arguments":"{\"kind\": \"figs\"}"}}
    if ! [[ $said =~ \"id\":\"([^\"]*)\".*:\ *\\\"([^\\]*)\\\"\}\" ]]; then
        if [[ $said == *"\"content\":\"$(known answer)\""* ]]; then reward=1; fi
        break
    fi
    found=$(known "${BASH_REMATCH[2]}")
    messages+=",{\"role\":\"tool\",\"tool_call_id\":\"${BASH_REMATCH[1]}\",\"content\":\"$found\"}"
done
echo "{\"reward\": $reward}"
