# What Etude offers to fish; read it with: etude completion fish | source
function __etude
    set -l typed (commandline -opc)
    $typed[1] complete fish $typed[2..-1] (commandline -ct) 2>/dev/null
end
complete -c etude -f -a '(__etude)'
