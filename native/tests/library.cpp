// The ring as one file: compiled separately under a sanitizer, its sources take twice as long, for they share headers.
#include "../src/frame.cpp"
#include "../src/mac.cpp"
#include "../src/quantise.cpp"
#include "../src/quantise_wide.cpp"
#include "../src/ring.cpp"
#include "../src/ring_delivery.cpp"
#include "../src/ring_exchange.cpp"
#include "../src/ring_workers.cpp"
