// Operations that JAX has no primitive for, a module each, under its name.

// sort with a comparison of its own
func.func @main(%x: tensor<4x6xf32>) -> (tensor<4x6xf32>) {
  %r = "stablehlo.sort"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %c = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
  stablehlo.return %c : tensor<i1> }) {dimension = 1 : i64} : (tensor<4x6xf32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// scatter that combines in its own way
func.func @main(%x: tensor<4x6xf32>, %at: tensor<3x1xi32>, %u: tensor<3x6xf32>) -> (tensor<4x6xf32>) {
  %r = "stablehlo.scatter"(%x, %at, %u) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %s = stablehlo.subtract %a, %b : tensor<f32>
  stablehlo.return %s : tensor<f32> }) {
  scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
  index_vector_dim = 1>} : (tensor<4x6xf32>, tensor<3x1xi32>, tensor<3x6xf32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// sort with a constant from outside
func.func @main(%x: tensor<4x6xf32>) -> (tensor<4x6xf32>) {
  %k = stablehlo.constant dense<1.0> : tensor<f32>
  %r = "stablehlo.sort"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %s = stablehlo.multiply %a, %k : tensor<f32>
  %c = stablehlo.compare GT, %s, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
  stablehlo.return %c : tensor<i1> }) {dimension = 1 : i64} : (tensor<4x6xf32>) -> tensor<4x6xf32>
  return %r : tensor<4x6xf32>
}

// call of a function outside of the module
func.func @main(%x: tensor<6x6xf32>) -> (tensor<6x6xf32>) {
  %s = stablehlo.dot %x, %x : (tensor<6x6xf32>, tensor<6x6xf32>) -> tensor<6x6xf32>
  %r:2 = stablehlo.custom_call @lapack_spotrf_ffi(%s) {backend_config = "", mhlo.backend_config = {uplo = 76 : ui8},
    mhlo.frontend_attributes = {num_batch_dims = "0"}, operand_layouts = [dense<[0, 1]> : tensor<2xindex>],
    output_operand_aliases = [#stablehlo.output_operand_alias<output_tuple_indices = [0], operand_index = 0, operand_tuple_indices = []>],
    result_layouts = [dense<[0, 1]> : tensor<2xindex>, dense<> : tensor<0xindex>]} : (tensor<6x6xf32>) -> (tensor<6x6xf32>, tensor<i32>)
  return %r#0 : tensor<6x6xf32>
}
