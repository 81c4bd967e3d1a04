# Rates against length, of libattn and its rivals, from the CSV of peers.py:
#
#   bench/peers/run.sh --csv peers.csv
#   gnuplot -e "csv='peers.csv'; out='peers.svg'" bench/peers/plot.gp
#   gnuplot -e "csv='peers.csv'; out='peers2.svg'; threads=2" bench/peers/plot.gp
#
# Each rival's fastest variant, from its shortest call: self-attention of one
# sequence with 12 heads of width 64, full and causal; decoding with 32 query
# heads of width 128 over 8 and over 32.
if (!exists("csv")) csv = "peers.csv"
if (!exists("out")) out = "peers.svg"
if (!exists("threads")) threads = 1

set terminal svg size 900,640 dynamic background rgb "white"
set output out
set datafile separator ","
set datafile missing NaN
set logscale x 2
set grid
set yrange [0:*]
set key left top Left reverse

rivals = "libattn torch ort"
name(n) = n == 1 ? "libattn" : n == 2 ? "PyTorch" : "ONNX Runtime"
# Columns by name would need quotes in a filter, so: 3 kind, 4 layout, 5 dtype,
# 6 B, 7 Hq, 8 Hkv, 9 Tq, 10 Tk, 11 D, 12 threads, 13 rival, 19 GFLOP/s, 20 GB/s,
# 24 the rival's fastest, 25 direction.
kept(rival) = strcol(5) eq "f32" && column(6) == 1 && column(12) == threads \
    && strcol(13) eq rival && column(24) == 1 && strcol(25) eq "forward"
self(rival, kind) = kept(rival) && strcol(3) eq kind && strcol(4) eq "bthd" \
    && column(7) == 12 && column(8) == 12 && column(11) == 64 \
    && column(9) == column(10) ? column(19) : NaN
decode(rival, heads) = kept(rival) && strcol(3) eq "decode" \
    && column(7) == 32 && column(8) == heads ? column(20) : NaN

set multiplot layout 2,2 title sprintf("float32, %d thread%s", threads, \
    threads > 1 ? "s" : "")
set xlabel "T (queries = keys)"
set ylabel "GFLOP/s, 4 B H T^2 D counted"
set title "full, B=1, H=12, D=64"
plot for [n=1:3] csv using 9:(self(word(rivals, n), "full")) skip 1 \
    smooth unique with linespoints title name(n)
set title "causal, B=1, H=12, D=64"
plot for [n=1:3] csv using 9:(self(word(rivals, n), "causal")) skip 1 \
    smooth unique with linespoints title name(n)
set xlabel "Tk, one query"
set ylabel "GB/s of K and V"
set key center right noreverse
set title "decoding, 32 heads over 8, D=128"
plot for [n=1:3] csv using 10:(decode(word(rivals, n), 8)) skip 1 \
    smooth unique with linespoints title name(n)
set title "decoding, 32 heads over 32, D=128"
plot for [n=1:3] csv using 10:(decode(word(rivals, n), 32)) skip 1 \
    smooth unique with linespoints title name(n)
unset multiplot
