#!/bin/sh
# Fetches a corpus by name and prepares token shards of it in data/NAME. See usage below.
set -eu
cd "$(dirname "$0")/.."

usage() {
    cat <<'EOF'
usage: scripts/get_data.sh [NAME [COUNT]]

from the distribution's packages (apt; no root, nothing is installed but perl where it is missing):
  austen        Jane Austen's six novels, 4.0 MB, public domain (the default)
  kjv           the King James Bible, 4.4 MB
  domains       three kinds of text: Austen, the Jargon File, Webster's dictionary of 1913 (GPL-2+); 45 MB,
                a novel or a dictionary entry is a document
from the internet (curl; an interrupted download is resumed by the same command):
  tinyshakespeare   1.1 MB
  tinystories       TinyStories V2, 2.2 GB, CDLA-Sharing-1.0
  fineweb           FineWeb as GPT-2 tokens: COUNT shards (default 1, at most 103) of 200 MB and one for validation
  fineweb-edu       FineWeb-Edu as GPT-2 tokens: COUNT shards (default 1, at most 1000) of 200 MB and one for validation
The shards go to data/NAME, with the text they were made of. What is there already is left as it is.
EOF
}

say() { echo "get_data: $*"; }
fail() { echo "get_data: $*" >&2; exit 3; }

check_sum() { # FILE SHA256
    found=$(sha256sum < "$1")
    found=${found%% *}
    [ "$found" = "$2" ] ||
        fail "$1 ($(wc -c < "$1") bytes) has sha256 $found, expected $2 (hint: is it another version of the text?)"
}

check_size() { # FILE BYTES
    found=$(wc -c < "$1")
    [ "$found" -eq "$2" ] || fail "$1 has $found bytes, expected $2 (hint: remove it and run this again)"
}

prepare_here() { (cd "$new" && "$prepare" --out . "$@"); }

# ---- packages --------------------------------------------------------------------------------------------------------

# Unpacks packages into $tmp/PACKAGE. Lists of packages of its own are fetched where the system's are missing or stale: an
# ordinary user may not renew the system's.
unpack() {
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
        fail "apt-get and dpkg-deb are needed to fetch '$name' and are not here (hint: build/prepare takes a text of your own)"
    for package in "$@"; do
        mkdir "$tmp/deb-$package"
        if ! fetch_package "$package" 2> "$tmp/apt.log"; then
            say "renewing a private list of packages"
            mkdir -p "$tmp/apt/lists/partial" "$tmp/apt/cache/archives/partial"
            private="-o Dir::State::Lists=$tmp/apt/lists -o Dir::Cache=$tmp/apt/cache"
            # shellcheck disable=SC2086
            if ! { apt-get -qq -o APT::Sandbox::User=root $private update && fetch_package "$package"; } 2>> "$tmp/apt.log"; then
                cat "$tmp/apt.log" >&2
                fail "package $package could not be downloaded (hint: is there a network, and Debian or Ubuntu in apt's sources?)"
            fi
        fi
        dpkg-deb -x "$tmp/deb-$package"/*.deb "$tmp/$package"
        say "unpacked $package"
    done
}

private=""
fetch_package() {
    # shellcheck disable=SC2086
    (cd "$tmp/deb-$1" && apt-get -qq -o APT::Sandbox::User=root $private download "$1")
}

# R's lazy-load database: records of a big-endian length and a zlib stream; each inflates to a serialized character vector
# (R's XDR format, "X\n"). Prints each vector, line by line, and $2 behind each.
austen_text() { # RDB_FILE TEXT_BEHIND
    perl -MCompress::Zlib -e '
        my ($path, $behind) = @ARGV;
        open(my $in, "<:raw", $path) or die "$path: $!\n";
        local $/;
        my $file = <$in>;
        binmode STDOUT;
        my $at = 0;
        while ($at < length $file) {
            my $size = unpack("N", substr($file, $at, 4));
            my $rest = substr($file, $at + 4);
            my ($item) = inflateInit()->inflate($rest);
            defined $item && length $item == $size or die "$path: the record at byte $at is damaged\n";
            $at = length($file) - length $rest;
            my $pos = 0;
            my $word = sub { $pos += 4; unpack("N", substr($item, $pos - 4, 4)) };
            substr($item, 0, 2) eq "X\n" or die "$path: a record is not in XDR format\n";
            $pos = 2;
            my $version = $word->();
            $word->() for 1 .. 2;
            if ($version > 2) { my $name = $word->(); $pos += $name; }
            ($word->() & 255) == 16 or die "$path: a record is no character vector\n";
            for (my $left = $word->(); $left > 0; $left--) {
                $word->();
                my $bytes = $word->();
                $bytes = 0 if $bytes == 0xFFFFFFFF;
                print substr($item, $pos, $bytes), "\n";
                $pos += $bytes;
            }
            print $behind;
        }' "$1" "$2"
}

# A dictionary of the dict protocol: the index names each entry by offset and length in base 64. Prints an entry a document.
dict_text() { # INDEX DICT_GZ
    gzip -dc < "$2" > "$tmp/dict"
    perl -e '
        my ($index, $dict) = @ARGV;
        my %digit;
        @digit{"A" .. "Z", "a" .. "z", 0 .. 9, "+", "/"} = 0 .. 63;
        my $number = sub { my $n = 0; $n = $n * 64 + $digit{$_} for split //, $_[0]; $n };
        open(my $in, "<:raw", $index) or die "$index: $!\n";
        my %entry;
        while (<$in>) {
            chomp;
            my ($head, $offset, $length) = split /\t/;
            $entry{$number->($offset)} = $number->($length) unless $head =~ /^00-?database/;
        }
        open(my $text, "<:raw", $dict) or die "$dict: $!\n";
        binmode STDOUT;
        for my $offset (sort { $a <=> $b } keys %entry) {
            seek($text, $offset, 0);
            read($text, my $bytes, $entry{$offset}) == $entry{$offset} or die "$dict: the entry at byte $offset is cut off\n";
            $bytes =~ s/\s+$//;
            print $bytes, "\n<|endoftext|>\n";
        }' "$1" "$tmp/dict"
}

rdb=r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb

get_austen() {
    unpack r-cran-janeaustenr
    # one document, so that the last tenth of the bytes, on which the README's figures are measured, is the validation set
    austen_text "$tmp/$rdb" "
" > "$new/austen.txt"
    check_sum "$new/austen.txt" db2cdbf60584de5e99d05bf89964819ec32e0b9968920e12c4f1217bd63cf87f
    prepare_here --documents file austen.txt
}

get_kjv() {
    unpack bible-kjv bible-kjv-text
    bible=$tmp/bible-kjv/usr/bin/bible
    if ! "$bible" -p "$tmp/bible-kjv-text/usr/lib/" gen1:1 < /dev/null > "$tmp/bible.log" 2>&1; then
        unpack libreadline8 # what the program links, which small systems lack
        LD_LIBRARY_PATH=$(dirname "$(find "$tmp/libreadline8" -name 'libreadline.so.8')")
        export LD_LIBRARY_PATH
    fi
    "$bible" -p "$tmp/bible-kjv-text/usr/lib/" -f gen1:1-rev22:21 < /dev/null > "$new/kjv.txt"
    unset LD_LIBRARY_PATH
    check_sum "$new/kjv.txt" cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d
    prepare_here --documents file kjv.txt
}

get_domains() {
    unpack r-cran-janeaustenr dict-jargon dict-gcide
    austen_text "$tmp/$rdb" "<|endoftext|>
" > "$new/austen.txt"
    dict_text "$tmp/dict-jargon/usr/share/dictd/jargon.index" "$tmp/dict-jargon/usr/share/dictd/jargon.dict.dz" > "$new/jargon.txt"
    dict_text "$tmp/dict-gcide/usr/share/dictd/gcide.index" "$tmp/dict-gcide/usr/share/dictd/gcide.dict.dz" > "$new/webster.txt"
    prepare_here austen.txt jargon.txt webster.txt
}

# ---- the internet ----------------------------------------------------------------------------------------------------

# Into data/download, where an interrupted transfer waits to be resumed.
download() { # URL FILE
    mkdir -p "$(dirname "$2")"
    [ -e "$2" ] && return
    say "downloading $1"
    curl -fL --retry 5 --retry-delay 2 -C - -o "$2.part" "$1" ||
        fail "$1 could not be downloaded (hint: is there internet here? run this again to resume)"
    case $(head -c 15 "$2.part" | tr 'A-Z\0' 'a-z ') in
    *'<!doctype html'* | *'<html'*)
        rm -f "$2.part"
        fail "$1 answered with a web page instead of the file (hint: a proxy or a log-in page stands in between)" ;;
    esac
    mv "$2.part" "$2"
}

hub=https://huggingface.co/datasets

get_tinyshakespeare() {
    from=$PWD/data/download/tinyshakespeare.txt
    download https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt $from
    check_sum $from 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
    prepare_here --documents file "$from"
}

get_tinystories() {
    for part in train valid; do
        download $hub/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-$part.txt data/download/tinystories-$part.txt
    done
    from=$PWD/data/download
    prepare_here --val-fraction 0 "$from/tinystories-train.txt"
    prepare_here --val-fraction 1 "$from/tinystories-valid.txt"
}

token_shards() { # URL_STEM MOST
    case $count in
    '' | *[!0-9]*) usage >&2; exit 2 ;;
    esac
    [ "$count" -ge 1 ] && [ "$count" -le "$2" ] || { echo "get_data: $name has 1 to $2 shards, $count are asked for" >&2; exit 2; }
    i=0
    while [ "$i" -le "$count" ]; do
        [ "$i" -eq 0 ] && kind=val || kind=train
        file=data/$name/${1##*/}_${kind}_$(printf %06d "$i").bin
        download "$1_${kind}_$(printf %06d "$i").bin" "$file"
        check_size "$file" 200001024
        i=$((i + 1))
    done
    say "data/$name holds $count training shards and one for validation (hint: --data data/$name, a vocabulary of 50257 or more)"
}

# ---- main ------------------------------------------------------------------------------------------------------------

[ $# -le 2 ] || { usage >&2; exit 2; }
name=${1:-austen}
count=${2:-1}
case $name in
austen | kjv | domains) needs=data ;;
tinyshakespeare | tinystories | fineweb | fineweb-edu) needs=url ;;
-h | --help) usage; exit 0 ;;
*) usage >&2; echo "get_data: '$name' is not known" >&2; exit 2 ;;
esac
if [ -e "data/$name/train.bin" ] && [ -e "data/$name/val.bin" ]; then
    say "data/$name is there already (hint: remove the folder to make it anew)"
    exit 0
fi
scripts/deps.sh $needs
case $name in # shards as they are: each is there or not for itself
fineweb) token_shards $hub/kjj0/fineweb10B-gpt2/resolve/main/fineweb 103; exit ;;
fineweb-edu) token_shards $hub/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/main/edu_fineweb 1000; exit ;;
esac
[ -e "data/$name" ] && fail "data/$name exists without train.bin and val.bin (hint: remove or rename the folder)"
prepare=${BUILD:-build}/prepare
[ -x "$prepare" ] || { say "building $prepare"; make -s "$prepare"; }
case $prepare in /*) ;; *) prepare=$PWD/$prepare ;; esac

tmp=$(mktemp -d "$PWD/data/tmp.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT TERM HUP
new=$tmp/$name
mkdir "$new"
"get_$name"
# in one step, so that an interrupted run leaves no half of a data set, nor two runs at once a mixture
mv -T "$new" "data/$name" 2>/dev/null || [ -e "data/$name/train.bin" ] || fail "data/$name cannot be written"
say "data/$name is ready: $(ls "data/$name" | tr '\n' ' ')"
