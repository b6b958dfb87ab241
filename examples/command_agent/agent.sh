#!/usr/bin/env bash
# An agent in bash without dependencies. It calls the model over HTTP, executes the model's tool calls, and prints the
# reward in its last line. It reads the model's address and key from its environment, like any OpenAI client.
set -euo pipefail
export LC_ALL=C
task=$(cat)  # {"question": "How many figs are there?", "answer": "4", "shelves": {"figs": "C", …}, "numbers": {"C": "4", …}}
address=${OPENAI_BASE_URL#http://}
path=/${address#*/} address=${address%%/*}
tools='[{"type":"function","function":{"name":"find","description":"The shelf on which a kind of thing lies.",
  "parameters":{"type":"object","properties":{"kind":{"type":"string"}},"required":["kind"]}}},
 {"type":"function","function":{"name":"count","description":"How many things lie on a shelf.",
  "parameters":{"type":"object","properties":{"shelf":{"type":"string"}},"required":["shelf"]}}}]'

# Print the value of a key of the task.
lookup() {
    if [[ $task =~ \"$1\":\ *\"([^\"]*)\" ]]; then echo "${BASH_REMATCH[1]}"; else echo '?'; fi
}

# Send the messages so far, and print the model's reply.
ask() {
    local body="{\"model\":\"$ETUDE_MODEL\",\"messages\":[$messages],\"tools\":$tools}"
    exec 3<>"/dev/tcp/${address%:*}/${address##*:}"
    printf '%s\r\n' "POST $path/chat/completions HTTP/1.1" "Host: $address" "Authorization: Bearer $OPENAI_API_KEY" \
        "Content-Type: application/json" "Content-Length: ${#body}" "Connection: close" "" >&3
    printf '%s' "$body" >&3
    cat <&3
}

messages="{\"role\":\"user\",\"content\":\"$(lookup question)\"}"
reward=0
for _ in 1 2 3 4; do
    reply=$(ask)
    if ! [[ $reply =~ \"message\":(\{.*\}),\"logprobs\" ]]; then
        echo "$reply" >&2
        exit 1
    fi
    message=${BASH_REMATCH[1]}
    messages+=",$message"
    # A call looks like this: {"id":"call_1","type":"function","function":{"name":"find","arguments":"{\"kind\": \"figs\"}"}}
    if ! [[ $message =~ \"id\":\"([^\"]*)\".*:\ *\\\"([^\\]*)\\\"\}\" ]]; then
        if [[ $message == *"\"content\":\"$(lookup answer)\""* ]]; then reward=1; fi
        break
    fi
    result=$(lookup "${BASH_REMATCH[2]}")
    messages+=",{\"role\":\"tool\",\"tool_call_id\":\"${BASH_REMATCH[1]}\",\"content\":\"$result\"}"
done
echo "{\"reward\": $reward}"
