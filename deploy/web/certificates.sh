#!/bin/sh
# Make what deploy/web/web-config.yml names: an authority of your own, a certificate of it for hookd, one for Prometheus.
#
#     certificates.sh DIRECTORY NAME...        the names and addresses under which the machine is scraped
#
# Called again it keeps the authority, and renews the other two: a daemon that runs takes them with the next connection.
set -eu
umask 077

directory=$1
shift
names=
for name in "$@"; do
    case $name in
    *[!0-9.]*:* | *:*) names="$names,IP:$name" ;;
    *[!0-9.]*) names="$names,DNS:$name" ;;
    *) names="$names,IP:$name" ;;
    esac
done
mkdir -p "$directory"
cd "$directory"

make() { # NAME SUBJECT OPTION...
    file=$1 subject=$2
    shift 2
    openssl req -x509 -config /dev/null -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -sha256 \
        -subj "/CN=$subject" -keyout "$file.key.new" -out "$file.crt.new" "$@" 2>openssl.log || {
        cat openssl.log >&2
        return 1
    }
    chmod 644 "$file.crt.new"
    mv "$file.key.new" "$file.key"
    mv "$file.crt.new" "$file.crt"
    rm -f openssl.log
}

[ -e ca.key ] || make ca "hookd authority" -days 3650 -addext basicConstraints=critical,CA:TRUE \
    -addext keyUsage=critical,keyCertSign,cRLSign
make server "$1" -days 365 -CA ca.crt -CAkey ca.key -addext basicConstraints=critical,CA:FALSE \
    -addext keyUsage=critical,digitalSignature -addext extendedKeyUsage=serverAuth \
    -addext "subjectAltName=${names#,}"
make prometheus prometheus -days 365 -CA ca.crt -CAkey ca.key -addext basicConstraints=critical,CA:FALSE \
    -addext keyUsage=critical,digitalSignature -addext extendedKeyUsage=clientAuth \
    -addext subjectAltName=DNS:prometheus
