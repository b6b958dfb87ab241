# What Etude offers to zsh; read it, after compinit, with: source <(etude completion zsh)
_etude() {
    local line word
    local -a texts shown
    while IFS=$'\t' read -r word line; do
        texts+=("$word")
        shown+=("${word% }${line:+  -- $line}")
    done < <("${words[1]}" complete zsh "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)
    (( ${#texts} )) && compadd -U -Q -S '' -l -d shown -- "${texts[@]}"
}
compdef _etude etude
